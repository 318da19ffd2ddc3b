"""Masked tokens, SpanBERT's spans and permutations over a million tokens: rates, lengths, replacements."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.errors import UsageError
from megatfm.objectives import SpecialTokens

MASK, CLS, SEP, IGNORE = 3, 4, 5, -100
TEXTS = 2000
LENGTH = 500


def within(count: float, n: float, share: float) -> bool:
    """Five standard deviations of a binomial."""
    return abs(count - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@pytest.fixture(scope="module")
def million(make_objective: Any, make_text: Any, build_one: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts, what is shown, and targets, without marks: each [TEXTS, LENGTH]."""
    result = make_objective("masked")
    texts = np.stack([make_text(LENGTH, seed) for seed in range(TEXTS)]).astype(np.int64)
    fields = [build_one(result, tokens, sample=i) for i, tokens in enumerate(texts)]
    for name, ends in (("tokens", (CLS, SEP)), ("targets", (IGNORE, IGNORE))):
        assert {(int(f[name][0]), int(f[name][-1])) for f in fields} == {ends}
    return (
        texts,
        np.stack([f["tokens"][1:-1] for f in fields]),
        np.stack([f["targets"][1:-1] for f in fields]),
    )


def test_rates_over_a_million_tokens(million: Any, special: SpecialTokens) -> None:
    texts, displayed, targets = million
    chosen = targets != IGNORE
    assert (targets[chosen] == texts[chosen]).all(), "the original token is the target"
    assert (displayed[~chosen] == texts[~chosen]).all(), "nothing else is changed"
    assert within(chosen.sum(), texts.size, 0.15)
    assert within((chosen.sum(0) - 0.15 * TEXTS).max() + 0.15 * TEXTS, TEXTS, 0.15), "any place is as likely"
    masked = displayed[chosen] == MASK
    unchanged = displayed[chosen] == texts[chosen]
    random = ~masked & ~unchanged
    n = chosen.sum()
    # A random token is the original one now and then.
    same = 0.1 / len(special.text_ids)
    assert within(masked.sum(), n, 0.8)
    assert within(unchanged.sum(), n, 0.1 + same)
    assert within(random.sum(), n, 0.1 - same)


def test_random_tokens_are_uniform_over_ordinary_ones(million: Any, special: SpecialTokens) -> None:
    texts, displayed, targets = million
    random = displayed[(targets != IGNORE) & (displayed != MASK) & (displayed != texts)]
    counts = np.bincount(random, minlength=1000)
    assert counts[:200].sum() == 0, "reserved ids are never shown"
    assert special.text_ids.tolist() == list(range(200, 1000))
    expected = counts.sum() / 800
    chi2 = float(((counts[200:] - expected) ** 2 / expected).sum())
    assert abs(chi2 - 799) < 5 * (2 * 799) ** 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_short_texts_have_the_same_rate(make_objective: Any, make_text: Any, build_one: Any, n: int) -> None:
    result = make_objective("masked")
    chosen = sum((build_one(result, make_text(n), sample=i)["targets"] != IGNORE).sum() for i in range(3000))
    assert within(chosen, 3000 * n, 0.15)


def test_whole_words_are_masked_as_a_whole(
    make_objective: Any, make_text: Any, build_one: Any, special: SpecialTokens
) -> None:
    result = make_objective("masked", whole_words=True)
    chosen, n = 0, 0
    for sample in range(600):
        tokens = make_text(LENGTH, sample)
        is_chosen = build_one(result, tokens, sample=sample)["targets"][1:-1] != IGNORE
        assert special.word_starts is not None
        starts = special.word_starts[tokens].copy()
        starts[0] = True
        word = np.cumsum(starts) - 1
        share = np.bincount(word, is_chosen) / np.bincount(word)
        assert set(share.tolist()) <= {0.0, 1.0}
        chosen, n = chosen + int(is_chosen.sum()), n + LENGTH
    assert within(chosen, n, 0.15)


def test_static_masks_are_the_same_in_every_epoch(make_objective: Any, make_text: Any, build_one: Any) -> None:
    tokens = make_text(200)
    for static in (False, True):
        result = make_objective("masked", static=static)
        masks = {build_one(result, tokens, epoch=epoch)["tokens"].tobytes() for epoch in range(5)}
        assert len(masks) == (1 if static else 5)
        remaining = {build_one(result, tokens, sample=sample)["tokens"].tobytes() for sample in range(5)}
        assert len(remaining) == 5


def test_sequences_fit_rows_and_nothing_makes_none(make_objective: Any) -> None:
    result = make_objective("masked", rows=(64,))
    assert result.max_tokens == 62
    assert result.sequence_lengths(np.array([62, 1, 0]), np.zeros(3, np.uint64)).tolist() == [64, 3, 0]
    with pytest.raises(UsageError, match=r"data\.sequence_length = 2 is too short for objective\.name = 'masked'"):
        make_objective("masked", rows=(2,))


def test_missing_special_tokens_are_named(make_objective: Any, make_model: Any, special: SpecialTokens) -> None:
    bare = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=10)
    with pytest.raises(
        UsageError, match=r"objective\.name = 'masked' needs a mask token, and the tokenizer has none: p"
    ):
        make_objective("masked", special=bare)
    with pytest.raises(
        UsageError, match=r"'masked' predicts tokens, and a model with .*: set model\.lm_head\.name=linear"
    ):
        make_objective("masked", model_config=make_model("encoder").with_changes({"lm_head": {"name": "none"}}))
    with pytest.raises(UsageError, match=r"'masked' does not train model\.family = 'decoder', but encoder"):
        make_objective("masked", family="decoder")
    wordless = replace(special, word_starts=None)
    with pytest.raises(UsageError, match=r"objective\.whole_words = true needs to know where words begin"):
        make_objective("masked", special=wordless, whole_words=True)
    with pytest.raises(UsageError, match=r"objective\.name = 'span_boundary' needs to know where words begin"):
        make_objective("span_boundary", special=wordless)


def test_85_of_100_chosen_tokens_are_masked(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, n, masked, chosen = make_objective("replaced_token"), 400, 0, 0
    for sample in range(2500):
        tokens = make_text(n, sample)
        fields = build_one(result, tokens, sample=sample)
        assert fields["original"].tolist() == [CLS, *tokens.tolist(), SEP]
        is_chosen = fields["targets"] != IGNORE
        assert (fields["targets"][is_chosen] == fields["original"][is_chosen]).all()
        changed = fields["tokens"] != fields["original"]
        assert (fields["tokens"][changed] == MASK).all(), "no random tokens"
        assert is_chosen[changed].all()
        masked, chosen = masked + int(changed.sum()), chosen + int(is_chosen.sum())
    assert abs(chosen - 150_000) < 5 * (1e6 * 0.15 * 0.85) ** 0.5
    assert abs(masked - 0.85 * chosen) < 5 * (chosen * 0.85 * 0.15) ** 0.5


def test_the_terms_and_their_counts(make_objective: Any) -> None:
    result = make_objective("replaced_token")
    assert dict(result.loss_weights) == {"generator": 1.0, "discriminator": 50.0}
    batch = {
        "targets": torch.tensor([[IGNORE, 7, IGNORE, IGNORE]]),
        "documents": torch.tensor([[0, 0, 0, -1]]),
    }
    assert {name: int(count) for name, count in result.target_counts(batch).items()} == {
        "generator": 1,
        "discriminator": 3,
    }
    assert make_objective("replaced_token", discriminator_weight=10).loss_weights["discriminator"] == pytest.approx(10)


# --------------------------------------------------------------------------------- spans and their boundaries


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


def test_the_replacement_of_a_span_is_drawn_once(spans: dict[str, Any]) -> None:
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


def test_spans_lie_anywhere_and_at_both_ends_alike(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, tokens = make_objective("span_boundary"), make_text(100)
    counts = sum((build_one(result, tokens, sample=i)["targets"][1:-1] != IGNORE).astype(int) for i in range(2000))
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


# ----------------------------------------------------------------------------------------------- permutations


def texts_targets(fields: dict[str, np.ndarray]) -> np.ndarray:
    """Which tokens of the text, without its marks, are predicted."""
    return fields["targets"][~np.isin(fields["tokens"], (SEP, CLS))] != IGNORE


def test_permutation_sequence_and_its_cuts(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, cuts = make_objective("permutation"), set()
    for sample in range(200):
        tokens = make_text(20, sample)
        fields = build_one(result, tokens, sample=sample)
        marks = np.flatnonzero(np.isin(fields["tokens"], (SEP, CLS)))
        first = int(marks[0])
        cuts.add(first)
        assert fields["tokens"][marks].tolist() == [SEP, SEP, CLS]
        assert marks[1:].tolist() == [21, 22]
        assert np.delete(fields["tokens"], marks).tolist() == tokens.tolist(), "nothing is masked"
        assert fields["segments"].tolist() == [0] * (first + 1) + [1] * (21 - first) + [2]
        expected = fields["targets"] != IGNORE
        assert (fields["targets"][expected] == fields["tokens"][expected]).all()
        assert not expected[marks].any()
        assert (fields["order"] > 0).tolist() == expected.tolist()
        assert sorted(fields["order"][expected]) == list(range(1, expected.sum() + 1))
    assert cuts == set(range(1, 20)), "both segments have a token, and every cut is drawn"


@pytest.fixture(scope="module")
def chosen(make_objective: Any, make_text: Any, build_one: Any) -> np.ndarray:
    """[texts, tokens]."""
    result, text = make_objective("permutation"), make_text(LENGTH)
    return np.stack([texts_targets(build_one(result, text, sample=i)) for i in range(TEXTS)])


def test_one_in_six_is_predicted_wherever_it_stands(chosen: np.ndarray) -> None:
    """A token's rate has a standard deviation of 0.0083; that of a whole text's sum is less, spans being spread."""
    rates = chosen.mean(0)
    assert rates.mean() == pytest.approx(1 / 6, abs=0.0005)
    assert abs(rates - 1 / 6).max() < 5 * 0.0084
    for edge in (rates[:10], rates[-10:]):
        assert edge.mean() == pytest.approx(1 / 6, abs=0.011)


@pytest.mark.parametrize(("every", "n"), [(6, 2), (6, 11), (3, 7), (2, 40)])
def test_short_texts_are_predicted_at_the_same_rate(
    make_objective: Any, make_text: Any, build_one: Any, every: int, n: int
) -> None:
    result = make_objective("permutation", tokens_per_prediction=every)
    actual = np.stack([texts_targets(build_one(result, make_text(n), sample=i)) for i in range(4000)])
    assert actual.mean() == pytest.approx(1 / every, abs=5 * (0.25 * 5 / (4000 * n)) ** 0.5)


def test_spans_are_uniform_from_one_to_five(make_objective: Any, make_text: Any, build_one: Any) -> None:
    """With contexts so wide that spans hardly ever touch or reach beyond the text, runs of targets are spans."""
    result, runs = make_objective("permutation", tokens_per_prediction=100), Counter[int]()
    for sample in range(TEXTS):
        targets = texts_targets(build_one(result, make_text(LENGTH), sample=sample))
        edges = np.flatnonzero(np.diff(targets, prepend=False, append=False)).reshape(-1, 2)
        runs.update(int(end - begin) for begin, end in edges if begin > 0 and end < LENGTH)
    total = sum(n for length, n in runs.items() if length <= 5)
    assert total > 2500
    assert sum(n for length, n in runs.items() if length > 5) < 0.01 * total
    expected = total / 5
    assert sum((runs[i] - expected) ** 2 / expected for i in range(1, 6)) < 4 + 6 * 8**0.5


def test_a_context_has_one_span(chosen: np.ndarray) -> None:
    """Spread like contexts of K · L: the number of targets in a text varies far less than if each were drawn alone."""
    assert chosen.sum(1).var() < 0.5 * LENGTH * (1 / 6) * (5 / 6)


def test_orders_are_uniform(make_objective: Any, make_text: Any, build_one: Any) -> None:
    """All six orders of three targets are as frequent."""
    result, orders = make_objective("permutation"), Counter[tuple[int, ...]]()
    for sample in range(6000):
        order = build_one(result, make_text(18), sample=sample)["order"]
        if order.max() == 3:
            orders[tuple(order[order > 0])] += 1
    expected = sum(orders.values()) / 6
    assert expected > 100
    assert len(orders) == 6
    assert sum((n - expected) ** 2 / expected for n in orders.values()) < 5 + 6 * 10**0.5


def test_permutations_differ_by_epoch(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, text = make_objective("permutation"), make_text(60)
    assert len({build_one(result, text, epoch=i)["order"].tobytes() for i in range(20)}) == 20


def test_counts_are_the_targets(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result = make_objective("permutation")
    fields = build_one(result, make_text(60))
    (count,) = result.target_counts({name: torch.from_numpy(values)[None] for name, values in fields.items()}).values()
    assert int(count) == (fields["order"] > 0).sum() > 0
