"""Metrics by hand: counts written out, and the interval's coverage."""

import numpy as np
import pytest

from megatfm.tasks import metrics

TARGETS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
PREDICTED = np.array([0, 1, 1, 1, 1, 1, 0, 0])


def test_metrics_of_two_classes() -> None:
    tp, fp, fn, tn = 3, 2, 2, 1
    classification_metrics = metrics.classification_metrics(TARGETS, PREDICTED)
    assert classification_metrics["accuracy"] == pytest.approx(4 / 8)
    assert classification_metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert classification_metrics["f1_macro"] == pytest.approx(
        (2 * tp / (2 * tp + fp + fn) + 2 * tn / (2 * tn + fp + fn)) / 2
    )
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert classification_metrics["matthews"] == pytest.approx((tp * tn - fp * fn) / product**0.5)
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
