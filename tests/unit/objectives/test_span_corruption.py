"""Span corruption against T5's algorithm, written out anew, and UL2's mixture: shares, mode tokens, lengths."""

from dataclasses import replace

import numpy as np
import pytest

from megatfm.errors import UsageError
from megatfm.objectives import SpecialTokens
from megatfm.rng import chunk_keys
from tests.support.text_objectives import SPECIAL, build_fields, make_objective, make_text

EOS, PAD = 2, 0


def t5_counts(length: int, density: float, mean: float) -> tuple[int, int]:
    """Python's round is half to even, as TensorFlow's."""
    noise = min(max(round(length * density), 1), length - 1)
    return noise, max(round(noise / mean), 1)


def t5_inputs_and_targets(tokens: list[int], is_noise: list[bool], sentinels: list[int]) -> tuple[list[int], list[int]]:
    """One token after the other: a run of noise becomes the next sentinel in the input, a run of what stays becomes
    it in the target."""

    def one(drop: bool) -> list[int]:
        out: list[int] = []
        used = 0
        for i, token in enumerate(tokens):
            if is_noise[i] != drop:
                out.append(token)
            elif i == 0 or is_noise[i - 1] != drop:
                out.append(sentinels[used])
                used += 1
        return [*out, EOS]

    return one(True), one(False)


def noise_of(tokens: np.ndarray, inputs: np.ndarray, sentinels: set[int]) -> list[bool]:
    """Which tokens are missing in the input; every token of the text is another one, so there is no doubt."""
    present = set(inputs.tolist()) - sentinels
    return [token not in present for token in tokens.tolist()]


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30, 99, 100, 400, 568])
@pytest.mark.parametrize(("rate", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.15, 64.0), (0.3, 1.0)])
def test_inputs_and_targets_are_t5s(n: int, rate: float, mean: float) -> None:
    special = SpecialTokens(bos=1, eos=EOS, pad=PAD, vocab_size=5000, sentinels=range(4999, 4599, -1))
    noise = {"noise_density": rate, "mean_noise_span_length": mean}
    result = make_objective("span_corruption", rows=(600, 600), special=special, **noise)
    tokens = np.random.default_rng(n).permutation(np.arange(10, 4000))[:n].astype(np.uint16)
    fields = build_fields(result, tokens, sample=n)
    noise = noise_of(tokens, fields["encoder_tokens"], set(special.sentinels))
    inputs, targets = t5_inputs_and_targets(tokens.tolist(), noise, list(special.sentinels))
    assert fields["encoder_tokens"].tolist() == inputs
    assert fields["targets"].tolist() == targets
    assert fields["tokens"].tolist() == [PAD, *targets[:-1]], "the decoder reads the targets shifted right"
    spans = sum(local and not before for local, before in zip(noise, [False, *noise], strict=False))
    wanted_noise, wanted_spans = t5_counts(n, rate, mean)
    assert sum(noise) == wanted_noise
    assert spans == min(wanted_spans, n - wanted_noise)
    assert not noise[0], "what stays comes first"
    assert noise[-1]


def test_rows_of_512_take_the_568_tokens_of_the_paper() -> None:
    """T5's `compute_input_and_target_lengths(512, 0.15, 3)` is (568, 114)."""
    special = SpecialTokens(bos=1, eos=EOS, pad=PAD, vocab_size=500, sentinels=range(100))
    result = make_objective("span_corruption", rows=(512, 114), special=special)
    assert result.max_tokens == 568
    lengths = result.sequence_lengths(np.array([568, 1, 0]), np.zeros(3, np.uint64))
    assert lengths.tolist() == [[512, 114], [0, 0], [0, 0]]
    assert make_objective("span_corruption", rows=(512, 60), special=special).max_tokens < 568


def t5_segmentation(rng: np.random.Generator, n_items: int, n_segments: int) -> list[int]:
    """T5's `_random_segmentation`: shuffle the starts of segments, the first item always starts one."""
    starts = np.arange(n_items - 1) < n_segments - 1
    rng.shuffle(starts)
    return np.bincount(np.cumsum(np.concatenate([[0], starts]))).tolist()


def test_spans_are_distributed_as_t5s() -> None:
    """Lengths of spans over a million tokens, against its segmentation drawn from another generator (χ², two samples;
    the bound is six standard deviations)."""
    result, rng = make_objective("span_corruption", rows=(512, 128)), np.random.default_rng(0)
    noise, spans = t5_counts(500, 0.15, 3.0)
    actual, expected = np.zeros(60), np.zeros(60)
    tokens = np.arange(200, 700).astype(np.uint16)
    first = np.zeros(500)
    for sample in range(2000):
        targets = build_fields(result, tokens, sample=sample)["targets"]
        at = np.flatnonzero((targets < 200) & (targets >= 40))
        lengths = np.diff(np.append(at, len(targets) - 1)) - 1
        assert lengths.sum() == noise
        actual += np.bincount(lengths, minlength=60)[:60]
        expected += np.bincount(t5_segmentation(rng, noise, spans), minlength=60)[:60]
        first[targets[targets >= 200] - 200] += 1
    keep = actual + expected > 20
    chi2 = float(((actual - expected)[keep] ** 2 / (actual + expected)[keep]).sum())
    free = int(keep.sum()) - 1
    assert chi2 < free + 6 * (2 * free) ** 0.5
    assert actual @ np.arange(60) == 2000 * noise
    middle = first[50:450] / 2000  # the ends differ: the first token stays and the last goes
    assert abs(middle.mean() - 0.15) < 0.005


def test_a_decoder_reads_the_input_as_its_prefix() -> None:
    two = make_objective("span_corruption", rows=(512, 128))
    one = make_objective("span_corruption", family="decoder", rows=(640,))
    tokens = make_text(300)
    pair, joined = build_fields(two, tokens), build_fields(one, tokens)
    inputs, expected = pair["encoder_tokens"][:-1], pair["targets"]
    full = np.concatenate([inputs, expected])
    assert joined["tokens"].tolist() == full[:-1].tolist()
    assert joined["prefix"].tolist() == [1] * len(inputs) + [0] * (len(expected) - 1)
    assert joined["targets"].tolist() == [-100] * (len(inputs) - 1) + expected.tolist()
    assert (one.loss_weights.keys(), two.loss_weights.keys()) == ({"causal"}, {"span"})


def test_too_few_sentinels_and_a_missing_length_name_what_is_needed() -> None:
    few = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=500, sentinels=range(10))
    with pytest.raises(UsageError, match=r"up to 28 spans .* has 10 sentinels: .*tokenizer\.sentinels=28"):
        make_objective("span_corruption", rows=(512, 114), special=few)
    with pytest.raises(UsageError, match=r"fills two rows: set data\.target_length, .* data\.target_length=128"):
        make_objective("span_corruption", rows=(512,))


MODES = {6: "R", 7: "S", 8: "X"}
IGNORE = -100
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


def test_the_seven_denoisers_have_their_shares() -> None:
    result, tokens = make_objective("ul2", rows=(512, 512)), np.arange(200, 400)
    actual: dict[tuple[str, int, int], int] = {}
    ends = []
    for sample in range(3500):
        fields = build_fields(result, tokens, sample=sample)
        denoiser = kind(fields, 200)
        actual[denoiser] = actual.get(denoiser, 0) + 1
        both_sides = sorted([*fields["encoder_tokens"], *fields["targets"]])
        assert both_sides[-200:] == list(range(200, 400)), "each token once"
        if denoiser[0] == "S":
            assert fields["encoder_tokens"][1:-1].tolist() + fields["targets"][:-1].tolist() == tokens.tolist()
            ends.append(len(fields["targets"]) - 1)
    assert actual.keys() == SETTINGS.keys()
    for denoiser, share in SETTINGS.items():
        assert abs(actual[denoiser] - 3500 * share) < 5 * (3500 * share * (1 - share)) ** 0.5, denoiser
    assert min(ends) >= 1
    assert max(ends) <= 100
    assert np.mean(ends) == pytest.approx(50, abs=7), "a quarter of the text on average"


def test_weights_choose_among_them() -> None:
    result = make_objective("ul2", rows=(512, 512), r_denoiser_weight=1, x_denoiser_weight=0, s_denoiser_weight=3)
    modes = [kind(build_fields(result, np.arange(200, 400), sample=i), 200)[0] for i in range(1000)]
    assert set(modes) == {"R", "S"}
    assert abs(modes.count("S") - 750) < 5 * 187.5**0.5


@pytest.mark.parametrize("family", ["encoder_decoder", "decoder"])
@pytest.mark.parametrize("with_modes", [True, False])
def test_all_lengths_fit_and_are_kept(family: str, with_modes: bool) -> None:
    tokenizer = SPECIAL if with_modes else replace(SPECIAL, modes={})
    rows = (128, 80)[: 2 if family == "encoder_decoder" else 1]
    result = make_objective("ul2", family=family, rows=rows, special=tokenizer)
    for n in (2, 3, 5, 9, result.max_tokens - 1, result.max_tokens):
        tokens = np.arange(200, 200 + n)
        for sample in range(100):
            fields = build_fields(result, tokens, sample=sample)
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


def test_the_denoiser_is_the_same_in_every_epoch_and_the_spans_are_not() -> None:
    result, tokens = make_objective("ul2", rows=(512, 512)), np.arange(200, 400)
    for sample in range(20):
        epochs = [build_fields(result, tokens, sample=sample, epoch=epoch) for epoch in range(3)]
        assert len({kind(fields, 200) for fields in epochs}) == 1
        if (epochs[0]["targets"] < 200).sum() > 2:  # T5's algorithm puts a single span always at the end
            assert len({fields["targets"].tobytes() for fields in epochs}) > 1
