"""Attention that no kernel knows, of some queries at a time: the gradients of all at once, and no more scores."""

import logging

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops import log_once
from megatfm.ops.attention import reference
from megatfm.ops.cross_entropy import IGNORE
from tests.support.packed_rows import ROW_LENGTH, SCORE_MODELS, SCORE_SIZES, loss_gradients, score_inputs

STEP = 6
"""So many queries at a time."""


def pieces_of(family: str, inputs: dict[str, Tensor]) -> int:
    """Of two blocks, of which XLNet's content stream goes through the first alone."""
    of_row = -(-ROW_LENGTH // STEP)
    if family != "xlnet":
        return 2 * of_row
    most = int((inputs["targets"] != IGNORE).sum(1).max())
    assert most % STEP
    return of_row + 2 * -(-most // STEP)


KINDS = {
    "shaw": "Full(causal=True) with Shaw's positions",
    "deberta": "disentangled",
    "xlnet": "two-stream",
}


@pytest.mark.parametrize("name", KINDS)
def test_how_it_is_computed_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(log_once, "_LOGGED", set())
    config = ModelConfig.from_dotted({**SCORE_SIZES, **SCORE_MODELS[name]})
    model, inputs = build(config).eval(), score_inputs(config.family, prefix=False)
    initialise(model, 3)
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        model(**inputs)
        monkeypatch.setattr(reference, "MAX_SCORES", 1)
        model(**inputs)
    assert [record.message for record in caplog.records if "attention" in record.message] == [
        f"attention {KINDS[name]} on cpu in float32 runs in kernel products, {how}"
        for how in ("all queries at once", "some queries at a time, and again in the backward pass")
    ]


@pytest.mark.parametrize("name", SCORE_MODELS)
def test_gradients_are_those_of_all_queries_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = ModelConfig.from_dotted({**SCORE_SIZES, **SCORE_MODELS[name]})
    inputs = score_inputs(config.family, prefix="prefixes" in name)
    model = build(config).double().train()
    initialise(model, 3)
    full, real, calls = loss_gradients(model, inputs), reference.checkpoint, []

    def counted(*inputs: object, **options: bool) -> object:
        calls.append(inputs)
        return real(*inputs, **options)

    monkeypatch.setattr(reference, "MAX_SCORES", 2 * 4 * ROW_LENGTH * STEP)
    monkeypatch.setattr(reference, "checkpoint", counted)
    parts = loss_gradients(model, inputs)
    assert len(calls) == pieces_of(config.family, inputs)
    assert parts.keys() == full.keys()
    for key, gradient in full.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        again = model(**inputs).losses
    monkeypatch.undo()
    with torch.no_grad():
        for term, loss in model(**inputs).losses.items():
            torch.testing.assert_close(again[term], loss, rtol=1e-12, atol=0)
