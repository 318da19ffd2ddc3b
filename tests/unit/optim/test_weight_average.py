"""The moving average of weights: its formula, under steps that are skipped, on ranks, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from megatfm.config import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerSection,
    ParallelConfig,
    ScheduleFreeConfig,
)
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.errors import UsageError
from megatfm.optim.parameters import optimizer_groups
from tests.support.image_models import IMAGE_MODELS, ImageObjective, image_model_batch
from tests.support.parity import build_engine, microbatches, one_device_reference
from tests.support.workers import Workers

DECAY = 0.8


class Plain(nn.Module):
    """A matrix and a bias."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5).double()


@pytest.mark.parametrize(
    "config", [AdamWConfig(lr=0.1, ema_decay=DECAY), LionConfig(lr=0.1, ema_decay=DECAY)]
)
def test_the_average_is_its_formula(config: OptimizerSection) -> None:
    """From the weights after the first step on; a skipped step moves nothing; the weights are the optimizer's own."""
    model = Plain()
    without = copy.deepcopy(model)
    plain, averaged = (
        ElementwiseOptimizer(optimizer_groups(c, m)[0], dict(m.named_parameters()))
        for c, m in ((config.model_copy(update={"ema_decay": None}), without), (config, model))
    )
    assert averaged.averaged() == {}
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for name, p in model.named_parameters()
        }
        for one in (plain, averaged):
            one.step({name: gradient.clone() for name, gradient in gradients.items()}, 0.1)
        for name, weight in model.named_parameters():
            assert torch.equal(weight, without.get_parameter(name))
            before = expected.get(name, weight.detach())
            expected[name] = DECAY * before + (1 - DECAY) * weight.detach()
    torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)
    if averaged.can_skip:
        averaged.step(
            {name: torch.full_like(e, torch.inf) for name, e in expected.items()}, 0.1, torch.ones(())
        )
        torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MuonConfig(lr=0.1, ema_decay=DECAY), "needs full tensors"),
        (ScheduleFreeConfig(lr=0.1, ema_decay=DECAY), "averages weights itself"),
        (AdamWConfig(lr=0.1, ema_decay=DECAY, moments_dtype="bf16"), "moments_dtype"),
    ],
)
def test_optimizers_that_it_does_not_go_with(config: OptimizerSection, reason: str) -> None:
    model = Plain()
    model.layers = nn.ModuleList([Plain().linear])
    with pytest.raises(UsageError, match=reason):
        optimizer_groups(config, model)


def averages(parallel: ParallelConfig) -> tuple[set[str], float]:
    """Names of the saved weights of this rank, and their largest difference from one device's after three steps."""
    config, batch = IMAGE_MODELS["class"], image_model_batch("class")
    optimizer = AdamWConfig(lr=1e-2, max_grad_norm=0.0, ema_decay=DECAY)
    model, objective, _ = one_device_reference(config, batch, ImageObjective)
    plain = torch.optim.AdamW([
        {"params": [p], "weight_decay": group["weight_decay"]}
        for name, p in model.named_parameters()
        for group in [optimizer_groups(optimizer, model)[0].options[name]]
    ], lr=1e-2, betas=(0.9, 0.95))  # fmt: skip
    engine, expected = build_engine(config, parallel, optimizer), dict[str, torch.Tensor]()
    for _ in range(3):
        engine.forward_backward(microbatches(engine, batch), objective)
        engine.step(1e-2, 0.0)
        model.zero_grad()
        terms = objective(model, batch)
        (terms["classifier"] / objective.target_counts(batch)["classifier"]).backward()
        plain.step()
        for name, weight in model.named_parameters():
            before = expected.get(name, weight.detach().clone())
            expected[name] = DECAY * before + (1 - DECAY) * weight.detach()
    saved = {n.removeprefix("model."): b for n, b in engine.state_dict().items() if n.startswith("model.")}
    worst = 0.0
    for name, box in saved.items():
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.tensor.shape, strict=True))
        worst = max(
            worst, float((box.tensor - expected[name][at]).abs().max()) if box.tensor.numel() else 0.0
        )
    return set(saved), worst


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(dp_shard=2), ParallelConfig(tp=2), ParallelConfig(dp_shard=2, zero=1)],
    ids=str,
)
def test_layouts_save_one_device_s_average(workers: Workers, parallel: ParallelConfig) -> None:
    for names, worst in workers.run(averages, 2, parallel):
        assert len(names) > 20
        assert worst < 1e-7  # Adam divides by the size of gradients that are nearly zero: key biases
