"""Every combination of norm placement, norm, activation, position and mask trains, in float32 and in bfloat16.

`make test` takes a ninth of them, in which every two parts meet; `make test-all` takes all.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.support.models import ACTIVATIONS, MASKS, NORM_POSITIONS, NORMS, POSITIONS, combination

SMALL = {"d_model": 8, "n_layers": 1, "ffn.d_ff": 12, "vocab_size": 17}
STEP = 1e-3
"""Length of the step against the gradient."""


def make(config: ModelConfig) -> nn.Module:
    model = build(config)
    initialise(model, seed=1)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than they start, so that no gradient vanishes in bfloat16
            parameter.data.mul_(0.4 / parameter.std())
    return model


def batch(config: ModelConfig, mask: str) -> dict[str, Tensor]:
    """Two rows of two documents, the second row with padding."""
    draw = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 17, (2, 2, 7), generator=draw)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, -1, -1]])
    result = {
        "tokens": tokens,
        "targets": targets.where(documents >= 0, -100),
        "documents": documents,
        "positions": torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 0, 0]]),
    }
    if mask == "prefix":
        result["prefix"] = (result["positions"] < 2).long()
    if config.family == "encoder_decoder":
        result |= {f"encoder_{key}": result[key] for key in ("tokens", "documents", "positions")}
    return result


def step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient to all parameters together; none of them is zero or not finite."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    (loss,) = model(**inputs).losses.values()
    gradients = torch.autograd.grad(loss, parameters)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.any(), f"{name} has no gradient"
    return loss.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])


EVERY = [*itertools.product(NORM_POSITIONS, NORMS, ACTIVATIONS)]
TURNS = 9
"""Each position and mask takes every ninth of them, from another start; nine divides no axis, so all pairs meet."""
CASES = [
    case
    for turn, (position, mask) in enumerate(itertools.product(POSITIONS, MASKS))
    for case in (
        pytest.param(position, mask, EVERY[turn % TURNS :: TURNS], id=f"{position}-{mask}"),
        pytest.param(position, mask, EVERY, id=f"{position}-{mask}, all", marks=pytest.mark.slow),
    )
]


@pytest.mark.parametrize(("position", "mask", "parts"), CASES)
def test_each_combination_of_parts_trains(position: str, mask: str, parts: list[tuple[str, str, str]]) -> None:
    for norm_position, norm, activation in parts:
        config = combination(norm_position, norm, activation, position, mask).with_changes(SMALL)
        model, result = make(config), batch(config, mask)
        loss, gradient = step(model, result)
        half_loss, half_gradient = step(model.bfloat16(), result)
        what = f"{norm_position}, {norm}, {activation}"
        assert abs(half_loss - loss) < 0.05 * loss, what
        assert torch.cosine_similarity(gradient, half_gradient, dim=0) > 0.9, what
        model.float()
        before = step(model, result)
        direction = before[1] / before[1].norm()
        start = 0
        for parameter in model.parameters():
            parameter.data -= STEP * direction[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        assert step(model, result)[0] < before[0], what
