"""UL2's mixture: shares, settings, mode tokens, and lengths that are known before any text is read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatfm.rng import chunk_keys

MODES = {6: "R", 7: "S", 8: "X"}
EOS, IGNORE = 2, -100
SETTINGS = {("R", 15, 3): 2 / 14, ("R", 15, 8): 2 / 14, ("X", 50, 3): 2 / 14, ("X", 50, 8): 2 / 14}
SETTINGS |= {("X", 15, 64): 2 / 14, ("X", 50, 64): 2 / 14, ("S", 0, 0): 2 / 14}


def kind(fields: dict[str, np.ndarray], n: int) -> tuple[str, int, int]:
    """Mode, percent of the tokens taken out and mean span, from a sequence of two sides."""
    mode = MODES[int(fields["encoder_tokens"][0])]
    if mode == "S":
        return mode, 0, 0
    expected = fields["targets"][:-1]
    spans = int((expected < 200).sum())
    noise = len(expected) - spans
    mean = min((3, 8, 64), key=lambda mu: abs(max(round(noise / mu), 1) - spans))
    return mode, round(100 * noise / n), mean


def test_the_seven_denoisers_have_their_shares(make_objective: Any, build_one: Any) -> None:
    result, tokens = make_objective("ul2", rows=(512, 512)), np.arange(200, 400)
    actual: dict[tuple[str, int, int], int] = {}
    ends = []
    for sample in range(3500):
        fields = build_one(result, tokens, sample=sample)
        one = kind(fields, 200)
        actual[one] = actual.get(one, 0) + 1
        assert sorted([*fields["encoder_tokens"], *fields["targets"]])[-200:] == list(range(200, 400)), (
            "each token once"
        )
        if one[0] == "S":
            assert (
                fields["encoder_tokens"][1:-1].tolist() + fields["targets"][:-1].tolist() == tokens.tolist()
            )
            ends.append(len(fields["targets"]) - 1)
    assert actual.keys() == SETTINGS.keys()
    for one, share in SETTINGS.items():
        assert abs(actual[one] - 3500 * share) < 5 * (3500 * share * (1 - share)) ** 0.5, one
    assert min(ends) >= 1
    assert max(ends) <= 100
    assert np.mean(ends) == pytest.approx(50, abs=7), "a quarter of the text on average"


def test_weights_choose_among_them(make_objective: Any, build_one: Any) -> None:
    result = make_objective(
        "ul2", rows=(512, 512), r_denoiser_weight=1, x_denoiser_weight=0, s_denoiser_weight=3
    )
    modes = [kind(build_one(result, np.arange(200, 400), sample=i), 200)[0] for i in range(1000)]
    assert set(modes) == {"R", "S"}
    assert abs(modes.count("S") - 750) < 5 * 187.5**0.5


@pytest.mark.parametrize("family", ["encoder_decoder", "decoder"])
@pytest.mark.parametrize("with_modes", [True, False])
def test_all_lengths_fit_and_are_kept(
    make_objective: Any, build_one: Any, special: Any, family: str, with_modes: bool
) -> None:
    """Including the longest chunks, of which each denoiser must fit."""
    tokenizer = special if with_modes else replace(special, modes={})
    rows = (128, 80)[: 2 if family == "encoder_decoder" else 1]
    result = make_objective("ul2", family=family, rows=rows, special=tokenizer)
    for n in (2, 3, 5, 9, result.max_tokens - 1, result.max_tokens):
        tokens = np.arange(200, 200 + n)
        for sample in range(100):
            fields = build_one(result, tokens, sample=sample)
            for name, field in fields.items():
                assert len(field) <= rows[0 if name.startswith("encoder_") else -1]
            if family == "decoder":
                first = {6, 7, 8} if with_modes else {1}
                assert int(fields["tokens"][0]) in first
                assert fields["prefix"][0] == 1
                assert (fields["targets"][:-1][fields["prefix"][1:] == 1] == IGNORE).all()
                assert fields["targets"][-1] == EOS
                assert (fields["targets"] != IGNORE).sum() >= 2
    keys = chunk_keys(7, np.arange(200), np.zeros(200))
    assert (result.sequence_lengths(np.full(200, result.max_tokens), keys) <= rows).all()
    assert (result.sequence_lengths(np.full(200, 1), keys) == 0).all()


def test_the_denoiser_is_the_same_in_every_epoch_and_the_spans_are_not(
    make_objective: Any, build_one: Any
) -> None:
    result, tokens = make_objective("ul2", rows=(512, 512)), np.arange(200, 400)
    for sample in range(20):
        epochs = [build_one(result, tokens, sample=sample, epoch=epoch) for epoch in range(3)]
        assert len({kind(fields, 200) for fields in epochs}) == 1
        if (epochs[0]["targets"] < 200).sum() > 2:  # T5's algorithm puts a single span always at the end
            assert len({fields["targets"].tobytes() for fields in epochs}) > 1
