"""Metrics by hand: counts written out, and the interval's coverage."""

import numpy as np
import pytest

from megatfm.tasks import metrics

TARGETS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
PREDICTED = np.array([0, 1, 1, 1, 1, 1, 0, 0])


def test_metrics_of_two_classes() -> None:
    tp, fp, fn, tn = 3, 2, 2, 1
    table = metrics.METRICS_OF_FORM["classification"]
    actual = {name: metric(TARGETS, PREDICTED) for name, metric in table.items()}
    assert actual["accuracy"] == pytest.approx(4 / 8)
    assert actual["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert actual["f1_macro"] == pytest.approx(
        (2 * tp / (2 * tp + fp + fn) + 2 * tn / (2 * tn + fp + fn)) / 2
    )
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert actual["matthews"] == pytest.approx((tp * tn - fp * fn) / product**0.5)
    assert metrics.confusion_matrix(TARGETS, PREDICTED, 3) == [[1, 2, 0], [2, 3, 0], [0, 0, 0]]
    scores = metrics.per_class_scores(TARGETS, PREDICTED, ["no", "yes", "never"])
    assert scores["yes"] == {"precision": 0.6, "recall": 0.6, "f1": pytest.approx(0.6), "examples": 5}
    assert scores["never"]["examples"] == 0


def test_three_classes_have_a_weighted_f1() -> None:
    targets, predicted = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])
    assert metrics.f1(targets, predicted) == pytest.approx((1 * 1 + 0 * 1 + 0.8 * 2) / 4)


def test_the_interval_covers_what_it_says() -> None:
    """Of 200 samples of a coin of 0.7, some 95 % of the intervals hold 0.7; within five deviations of that."""
    random, inside = np.random.default_rng(3), 0
    for _ in range(200):
        predicted = (random.random(100) < 0.7).astype(np.int64)
        low, high = metrics.bootstrap_interval(
            metrics.accuracy, np.ones(100, np.int64), predicted, samples=200
        )
        inside += low <= 0.7 <= high
    assert 0.95 - 5 * (0.95 * 0.05 / 200) ** 0.5 < inside / 200 <= 1
    same = [metrics.bootstrap_interval(metrics.accuracy, TARGETS, PREDICTED) for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O O", []),
        ("B-A I-A O B-A", [("A", 0, 2), ("A", 3, 4)]),
        ("B-A B-A I-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 3)]),
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),
        ("S-A B-A E-A I-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
    ],
)
def test_spans_are_those_of_conlleval(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert metrics.spans_of(tags.split()) == spans


def test_f1_of_spans() -> None:
    targets, predicted = [["B-A", "I-A", "O", "B-B"], ["O"]], [["B-A", "O", "O", "B-B"], ["B-B"]]
    assert metrics.span_f1(targets, predicted) == pytest.approx(2 * 1 / (2 + 3))
    assert metrics.span_f1([["O"]], [["O"]]) == 0


def test_many_labels_by_hand() -> None:
    targets, predicted = np.array([[1, 0, 1], [0, 0, 1]]), np.array([[1, 0, 1], [1, 0, 0]])
    assert metrics.exact_match(targets, predicted) == 0.5
    assert metrics.f1_micro(targets, predicted) == pytest.approx(2 * 2 / (3 + 3))
    assert metrics.f1_macro(targets, predicted) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)


def test_correlations_by_hand() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 3.0]), np.array([2.0, 9.0, 4.0, 100.0])
    n, ranks = len(x), (np.array([1, 2, 3.5, 3.5]), np.array([1, 3, 2, 4.0]))

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        covariance = (a * b).sum() - a.sum() * b.sum() / n
        return covariance / (((a * a).sum() - a.sum() ** 2 / n) * ((b * b).sum() - b.sum() ** 2 / n)) ** 0.5

    assert metrics.pearson(x, y) == pytest.approx(correlation(x, y))
    assert metrics.spearman(x, y) == pytest.approx(correlation(*ranks))
    assert metrics.pearson(x, np.ones(4)) == 0
    assert metrics.r2(x, x + 1) == pytest.approx(1 - 4 / ((x - x.mean()) ** 2).sum())
