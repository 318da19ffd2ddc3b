"""muP's promise: what a few steps change in the logits does not grow with the width (Yang et al. 2022, D.1)."""

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.models import build, lr_scales

BASE, WIDTHS = 32, (32, 128, 512)


def change_of_logits(width: int, mup: bool) -> float:
    """Root mean square of what four AdamW steps change."""
    config = ModelConfig(
        vocab_size=50,
        d_model=width,
        n_layers=2,
        mup={"base_width": BASE} if mup else None,
        attention={"n_heads": width // 16},
        ffn={"d_ff": 2 * width},
        embedding={"tied": False},
        init={"name": "normal", "std": 0.1},
    )
    model = build(config).double()
    initialise(model, 1)
    scales = lr_scales(model, config)
    groups = [{"params": [p], "lr": 0.01 * scales.get(name, 1.0)} for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(2))
    before = model(tokens).logits.detach()
    for _ in range(4):
        model(tokens[:, :-1], targets=tokens[:, 1:]).losses["causal"].div(64).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((model(tokens).logits.detach() - before).square().mean().sqrt())


def test_steps_change_the_logits_by_as_much_at_every_width() -> None:
    narrow, *wider = [change_of_logits(width, mup=True) for width in WIDTHS]
    assert all(0.5 < change / narrow < 2 for change in wider), (narrow, wider)


def test_without_mup_they_change_more_and_more() -> None:
    narrow, wide, wider = [change_of_logits(width, mup=False) for width in WIDTHS]
    assert wide > 2 * narrow
    assert wider > 2 * wide


def test_the_base_width_is_the_standard_parametrisation() -> None:
    assert change_of_logits(BASE, mup=True) == change_of_logits(BASE, mup=False)


def test_an_initialisation_that_follows_the_width_is_refused() -> None:
    config = ModelConfig(
        vocab_size=50,
        d_model=64,
        n_layers=1,
        mup={"base_width": 32},
        attention={"n_heads": 4},
        ffn={"d_ff": 64},
        init={"name": "xavier"},
    )
    with pytest.raises(UsageError, match=r"model\.mup does not go with model\.init\.name = 'xavier'"):
        build(config)
