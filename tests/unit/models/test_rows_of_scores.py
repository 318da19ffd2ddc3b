"""Attention that no kernel knows, of some queries at a time: the gradients of all at once, and no more scores."""

import logging

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import reference
from megatfm.ops.cross_entropy import IGNORE
from tests.unit.models.test_patterns_compose import LENGTH, batch, gradients

SIZES = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24}
SHAW = {"position.name": "shaw", "position.max_distance": 3, "attention.dropout": 0.2}
MODELS = {
    "shaw": SHAW,
    "shaw, prefixes": SHAW,
    "shaw, window": {**SHAW, "attention.pattern": {"name": "window", "width": 5, "initial_tokens": 1}},
    "shaw, bigbird": {
        **SHAW,
        "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "shaw of an encoder": {**SHAW, "family": "encoder"},
    "deberta": {
        "family": "encoder",
        "attention.name": "deberta",
        "attention.dropout": 0.2,
        "position.name": "deberta",
        "position.max_distance": 4,
    },
    "deberta v3": {
        "family": "encoder",
        "attention.name": "deberta_v2",
        "position.name": "deberta_v2",
        "position.buckets": 4,
        "position.max_distance": 8,
    },
    "xlnet": {
        "family": "xlnet",
        "attention.name": "two_stream",
        "attention.dropout": 0.2,
        "position.name": "transformer_xl",
    },
}
STEP = 6
"""So many queries at a time."""


def inputs_of(family: str, *, prefix: bool) -> dict[str, Tensor]:
    """Packed rows; of XLNet, with unequally many targets in random orders, and segments."""
    made = batch(family, prefix=prefix)
    if family != "xlnet":
        return made
    drawn = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = drawn.argsort(1).argsort(1) - torch.tensor([[13], [16]])
    targets = made["targets"].where((order > 0) & (made["documents"] >= 0), IGNORE)
    assert len(set((targets != IGNORE).sum(1).tolist())) == 2
    segments = (torch.arange(LENGTH) % 7 > 2).long().expand(2, -1)
    return made | {"order": order.clamp(min=0), "targets": targets, "segments": segments}


def pieces_of(family: str, inputs: dict[str, Tensor]) -> int:
    """Of two blocks, of which XLNet's content stream goes through the first alone."""
    of_row = -(-LENGTH // STEP)
    if family != "xlnet":
        return 2 * of_row
    most = int((inputs["targets"] != IGNORE).sum(1).max())
    assert most % STEP
    return of_row + 2 * -(-most // STEP)


KINDS = {
    "shaw": "Full(causal=True) with Shaw's positions",
    "deberta": "disentangled",
    "xlnet": "of two streams",
}


@pytest.mark.parametrize("name", KINDS)
def test_how_it_is_computed_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(reference, "_LOGGED", set())
    config = ModelConfig.from_dotted({**SIZES, **MODELS[name]})
    model, inputs = build(config).eval(), inputs_of(config.family, prefix=False)
    initialise(model, 3)
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        model(**inputs)
        monkeypatch.setattr(reference, "MAX_SCORES", 1)
        model(**inputs)
    assert [record.message for record in caplog.records if "attention" in record.message] == [
        f"attention {KINDS[name]}, on cpu in float32: kernel products, {how}"
        for how in ("all queries at once", "some queries at a time, and again in the backward pass")
    ]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_all_queries_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = ModelConfig.from_dotted({**SIZES, **MODELS[name]})
    inputs = inputs_of(config.family, prefix="prefixes" in name)
    model = build(config).double().train()
    initialise(model, 3)
    whole, real, calls = gradients(model, inputs), reference.checkpoint, []

    def counted(*given: object, **options: bool) -> object:
        calls.append(given)
        return real(*given, **options)

    monkeypatch.setattr(reference, "MAX_SCORES", 2 * 4 * LENGTH * STEP)
    monkeypatch.setattr(reference, "checkpoint", counted)
    parts = gradients(model, inputs)
    assert len(calls) == pieces_of(config.family, inputs)
    assert parts.keys() == whole.keys()
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        again = model(**inputs).losses
    monkeypatch.undo()
    with torch.no_grad():
        for term, loss in model(**inputs).losses.items():
            torch.testing.assert_close(again[term], loss, rtol=1e-12, atol=0)
