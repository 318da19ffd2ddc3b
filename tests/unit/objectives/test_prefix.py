"""Prefix language modelling: where texts are cut, and what is predicted."""

from typing import Any

import numpy as np
import pytest

from megatfm.rng import chunk_keys

BOS, EOS, PAD, IGNORE = 1, 2, 0, -100


def test_a_decoder_predicts_everything_after_its_prefix(
    make_objective: Any, make_text: Any, build_one: Any
) -> None:
    result, tokens = make_objective("prefix", rows=(64,)), make_text(63)
    assert result.max_tokens == 63
    full = [BOS, *tokens.tolist(), EOS]
    prefixes = []
    for sample in range(16_000):
        fields = build_one(result, tokens, sample=sample)
        assert fields["tokens"].tolist() == full[:-1]
        n = int(fields["prefix"].sum())
        assert fields["prefix"].tolist() == [1] * n + [0] * (64 - n)
        assert fields["targets"].tolist() == [IGNORE] * (n - 1) + full[n:], (
            "the prefix' last token predicts the next"
        )
        prefixes.append(n)
    counts = np.bincount(prefixes, minlength=65)
    assert counts[0] == 0
    chi2 = float(((counts[1:] - 16_000 / 64) ** 2 / (16_000 / 64)).sum())
    assert abs(chi2 - 63) < 5 * (2 * 63) ** 0.5, "uniform over 1 … 64"
    epochs = {int(build_one(result, tokens, epoch=epoch)["prefix"].sum()) for epoch in range(20)}
    assert len(epochs) > 5, "another one each epoch"


@pytest.mark.parametrize(("rows", "least"), [((64, 32), 32), ((32, 64), 1)])
def test_an_encoder_decoder_gets_both_parts(
    make_objective: Any, make_text: Any, build_one: Any, rows: tuple[int, int], least: int
) -> None:
    """Wherever both sides fit: with rows of 64 and 32 after 32 … 62 of 63 tokens, with 32 and 64 after 1 … 31."""
    result, tokens = make_objective("prefix", family="encoder_decoder", rows=rows), make_text(63)
    assert result.max_tokens == 63
    cuts = []
    for sample in range(16_000):
        fields = build_one(result, tokens, sample=sample)
        cut = len(fields["encoder_tokens"]) - 1
        assert fields["encoder_tokens"].tolist() == [*tokens[:cut].tolist(), EOS]
        assert fields["targets"].tolist() == [*tokens[cut:].tolist(), EOS]
        assert fields["tokens"].tolist() == [PAD, *tokens[cut:].tolist()]
        cuts.append(cut)
    counts = np.bincount(cuts, minlength=64)[least : least + 31]
    assert counts.sum() == 16_000, "both sides fit their rows"
    chi2 = float(((counts - 16_000 / 31) ** 2 / (16_000 / 31)).sum())
    assert abs(chi2 - 30) < 5 * (2 * 30) ** 0.5


def test_planned_lengths_are_those_of_any_epoch(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result = make_objective("prefix", family="encoder_decoder", rows=(64, 64))
    for n in (2, 3, 17, 63):
        lengths = {
            len(build_one(result, make_text(n), sample=3, epoch=epoch)["targets"]) for epoch in range(4)
        }
        assert len(lengths) == 1
    keys = chunk_keys(0, np.arange(5), np.zeros(5))
    assert result.sequence_lengths(np.array([0, 1, 2, 5, 63]), keys).min(1).tolist()[:3] == [0, 0, 2]
