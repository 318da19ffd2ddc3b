"""SpanBERT's spans over a million tokens: lengths in words, rates, what replaces them, and their boundaries."""

from typing import Any

import numpy as np
import pytest

from megatfm.errors import UsageError

MASK, IGNORE = 3, -100
TEXTS, LENGTH = 2000, 500


@pytest.fixture(scope="module")
def spans(make_objective: Any, make_text: Any, build_one: Any, special: Any) -> dict[str, Any]:
    """Spans as (words, text's tokens, what is shown) and totals, found from `targets` alone."""
    result = make_objective("span_boundary")
    actual: list[tuple[int, np.ndarray, np.ndarray]] = []
    n_words = n_masked = n_masked_words = 0
    for sample in range(TEXTS):
        tokens = make_text(LENGTH, sample)
        fields = build_one(result, tokens, sample=sample)
        chosen = fields["targets"][1:-1] != IGNORE
        displayed = fields["tokens"][1:-1]
        assert (fields["targets"][1:-1][chosen] == tokens[chosen]).all()
        assert (displayed[~chosen] == tokens[~chosen]).all()
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        starts = special.word_starts[tokens].copy()
        starts[0] = True
        word = np.append(np.cumsum(starts), starts.sum() + 1)
        left, right = np.zeros(LENGTH + 2, int), np.zeros(LENGTH + 2, int)
        for begin, end in edges.reshape(-1, 2):
            assert starts[begin], "a span begins with a word"
            assert end == LENGTH or starts[end], "and ends with one"
            actual.append((int(word[end - 1] - word[begin] + 1), tokens[begin:end], displayed[begin:end]))
            for i in range(begin, end):
                left[i + 1], right[i + 1] = i - (begin - 1), end - i
        assert fields["span_left"].tolist() == left.tolist()
        assert fields["span_right"].tolist() == right.tolist()
        n_words, n_masked = n_words + int(starts.sum()), n_masked + int(chosen.sum())
        n_masked_words += sum(span[0] for span in actual[-len(edges) // 2 :]) if len(edges) else 0
    return {"spans": actual, "words": n_words, "masked": n_masked, "masked words": n_masked_words}


def test_span_lengths_are_geometric(spans: dict[str, Any]) -> None:
    """P(l) ∝ 0.8^(l−1)·0.2 over 1 … 10, renormalised; the bound is six standard deviations of χ² with 9 degrees."""
    lengths = np.array([span[0] for span in spans["spans"]])
    share = 0.2 * 0.8 ** np.arange(10)
    expected = len(lengths) * share / share.sum()
    counts = np.bincount(lengths, minlength=11)[1:]
    assert len(counts) == 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 9 + 6 * 18**0.5
    assert lengths.mean() == pytest.approx(3.8, abs=0.05), "the paper's mean"


def test_fifteen_percent_are_masked(spans: dict[str, Any]) -> None:
    assert spans["masked"] / (TEXTS * LENGTH) == pytest.approx(0.15, abs=0.001)
    assert spans["masked words"] / spans["words"] == pytest.approx(0.15, abs=0.001)


def test_what_replaces_a_span_is_drawn_once(spans: dict[str, Any]) -> None:
    kinds = {"mask": 0, "random": 0, "kept": 0}
    for _, text, displayed in spans["spans"]:
        if (displayed == MASK).all():
            kinds["mask"] += 1
        elif (displayed == text).all():
            kinds["kept"] += 1
        else:
            assert not (displayed == MASK).any()
            assert (displayed >= 200).all()
            kinds["random"] += 1
    n = sum(kinds.values())
    for kind, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        assert abs(kinds[kind] - n * share) < 5 * (n * share * (1 - share)) ** 0.5 + n * 0.1 / 800


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_short_texts_work(make_objective: Any, make_text: Any, build_one: Any, n: int) -> None:
    result = make_objective("span_boundary", mask_rate=0.5)
    masked = [int((build_one(result, make_text(n), sample=i)["targets"] != IGNORE).sum()) for i in range(300)]
    assert max(masked) > 0
    assert max(masked) <= n


def test_spans_lie_anywhere_and_at_both_ends_alike(
    make_objective: Any, make_text: Any, build_one: Any
) -> None:
    result, tokens = make_objective("span_boundary"), make_text(100)
    counts = sum(
        (build_one(result, tokens, sample=i)["targets"][1:-1] != IGNORE).astype(int) for i in range(2000)
    )
    share = counts / 2000
    assert share[20:80].min() > 0.12
    assert share[20:80].max() < 0.2
    # The first word is masked only by a span that begins with it, the last only by one that ends with it.
    assert share.min() > 0.02
    assert share[:10].mean() == pytest.approx(share[-10:].mean(), abs=0.03)


def test_a_model_without_the_head_is_refused(make_objective: Any, make_model: Any) -> None:
    with pytest.raises(
        UsageError, match=r"'span_boundary' needs a model with the head: add \[model\.extra_heads\.boundary\]"
    ):
        make_objective("span_boundary", model_config=make_model("encoder").with_changes({"extra_heads": {}}))
