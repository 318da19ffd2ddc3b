"""Attention that no kernel knows, of some queries at a time: the gradients of all at once, and no more scores."""

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import rows
from tests.unit.models.test_patterns_compose import LENGTH, batch, gradients

SIZES = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24}
SHAW = {"position.name": "shaw", "position.max_distance": 3, "attention.dropout": 0.2}
MODELS = {
    "shaw": SHAW,
    "shaw, prefixes": SHAW,
    "shaw, window": {**SHAW, "attention.pattern": {"name": "window", "width": 5, "first": 1}},
    "shaw, bigbird": {**SHAW, "attention.pattern": {"name": "bigbird", "block": 2, "random": 1}},
    "shaw of an encoder": {**SHAW, "family": "encoder"},
    "deberta": {
        "family": "encoder",
        "attention.name": "disentangled",
        "attention.dropout": 0.2,
        "position.name": "disentangled",
        "position.max_distance": 4,
    },
    "deberta v3": {
        "family": "encoder",
        "attention.name": "disentangled_shared",
        "position.name": "disentangled_buckets",
        "position.buckets": 4,
        "position.max_distance": 8,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_all_queries_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = ModelConfig.of({**SIZES, **MODELS[name]})
    model, inputs = build(config).double().train(), batch(config.family, prefix="prefixes" in name)
    initialise(model, 3)
    whole, real, calls = gradients(model, inputs), rows.checkpoint, []

    def counted(*given: object, **options: bool) -> object:
        calls.append(given)
        return real(*given, **options)

    monkeypatch.setattr(rows, "AT_ONCE", 2 * 4 * LENGTH * 6)
    monkeypatch.setattr(rows, "checkpoint", counted)
    parts = gradients(model, inputs)
    assert len(calls) == 2 * -(-LENGTH // 6)
    assert parts.keys() == whole.keys()
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        again = model(**inputs).losses
    monkeypatch.undo()
    with torch.no_grad():
        for term, loss in model(**inputs).losses.items():
            torch.testing.assert_close(again[term], loss, rtol=1e-12, atol=0)
