"""Permutation language modelling over a million tokens: rates, spans, orders, and the fields of a sequence."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.support.text_objectives import build_fields, make_objective, make_text

CLS, SEP, IGNORE = 4, 5, -100
TEXTS = 2000
LENGTH = 500


def find_text_targets(fields: dict[str, np.ndarray]) -> np.ndarray:
    """Which tokens of the text, without its marks, are predicted."""
    return fields["targets"][~np.isin(fields["tokens"], (SEP, CLS))] != IGNORE


def test_fields_of_a_permuted_sequence() -> None:
    result, cuts = make_objective("permutation"), set()
    for sample in range(200):
        tokens = make_text(20, sample)
        fields = build_fields(result, tokens, sample=sample)
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
def chosen() -> np.ndarray:
    """[texts, tokens]."""
    result, text = make_objective("permutation"), make_text(LENGTH)
    return np.stack([find_text_targets(build_fields(result, text, sample=i)) for i in range(TEXTS)])


def test_every_position_is_predicted_at_the_same_rate(chosen: np.ndarray) -> None:
    """A token's rate has a standard deviation of 0.0083; that of a whole text's sum is less, spans being spread."""
    rates = chosen.mean(0)
    assert rates.mean() == pytest.approx(1 / 6, abs=0.0005)
    assert abs(rates - 1 / 6).max() < 5 * 0.0084
    for edge in (rates[:10], rates[-10:]):
        assert edge.mean() == pytest.approx(1 / 6, abs=0.011)


@pytest.mark.parametrize(("every", "n"), [(6, 2), (6, 11), (3, 7), (2, 40)])
def test_short_texts_are_predicted_at_the_same_rate(every: int, n: int) -> None:
    result = make_objective("permutation", tokens_per_prediction=every)
    actual = np.stack([find_text_targets(build_fields(result, make_text(n), sample=i)) for i in range(2000)])
    assert actual.mean() == pytest.approx(1 / every, abs=5 * (0.25 * 5 / (2000 * n)) ** 0.5)


def test_span_lengths_are_uniform() -> None:
    """Runs of targets are spans if contexts are so wide that spans hardly ever touch or reach beyond the text."""
    result, runs = make_objective("permutation", tokens_per_prediction=100), Counter[int]()
    for sample in range(TEXTS):
        targets = find_text_targets(build_fields(result, make_text(LENGTH), sample=sample))
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


def test_orders_are_uniform() -> None:
    result, orders = make_objective("permutation"), Counter[tuple[int, ...]]()
    for sample in range(6000):
        order = build_fields(result, make_text(18), sample=sample)["order"]
        if order.max() == 3:
            orders[tuple(order[order > 0])] += 1
    expected = sum(orders.values()) / 6
    assert expected > 100
    assert len(orders) == 6
    assert sum((n - expected) ** 2 / expected for n in orders.values()) < 5 + 6 * 10**0.5


def test_permutations_differ_by_epoch() -> None:
    result, text = make_objective("permutation"), make_text(60)
    assert len({build_fields(result, text, epoch=i)["order"].tobytes() for i in range(20)}) == 20


def test_target_counts_equal_the_predicted_tokens() -> None:
    result = make_objective("permutation")
    fields = build_fields(result, make_text(60))
    (count,) = result.target_counts({name: torch.from_numpy(values)[None] for name, values in fields.items()}).values()
    assert int(count) == (fields["order"] > 0).sum() > 0
