"""Metrics by hand: counts written out, and the interval's coverage."""

import random

import numpy as np
import pytest

from megatfm.tasks import metrics

TARGETS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
PREDICTED = np.array([0, 1, 1, 1, 1, 1, 0, 0])


def test_metrics_of_two_classes() -> None:
    tp, fp, fn, tn = 3, 2, 2, 1
    table = metrics.FORM_METRICS["classification"]
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
    assert metrics.tag_spans(tags.split()) == spans


def test_f1_of_spans() -> None:
    targets, predicted = [["B-A", "I-A", "O", "B-B"], ["O"]], [["B-A", "O", "O", "B-B"], ["B-B"]]
    assert metrics.span_f1(targets, predicted) == pytest.approx(2 * 1 / (2 + 3))
    assert metrics.span_f1([["O"]], [["O"]]) == 0


SEQEVAL = [
    ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 1),
    ("B-PER I-PER O", "B-PER O O", 0),
    ("B-PER I-PER O", "O B-PER O", 0),
    ("I-PER I-PER O", "B-PER I-PER O", 1),
    ("B-PER B-PER", "B-PER I-PER", 0),
    ("B-PER I-LOC", "B-PER I-PER", 0),
    ("O O", "O B-PER", 0),
    ("O", "O", 0),
    ("B-PER I-PER I-PER|I-PER", "B-PER I-PER I-PER|B-PER", 1),
    ("B-PER|I-PER", "B-PER|O", 2 / 3),
    ("B-PER I-PER E-PER S-LOC", "B-PER I-PER I-PER B-LOC", 1),
    ("S-PER S-PER", "B-PER E-PER", 0),
    ("E-PER E-PER I-PER", "I-PER I-PER I-PER", 0),
    ("B-A-B I-A-B O", "B-A-B I-A O", 0),
    ("O I-LOC O I-LOC B-LOC", "O B-LOC O B-LOC I-LOC", 0.4),
]
"""Tags of texts, predicted ones, and what seqeval 1.2.2's f1_score gives for them."""


@pytest.mark.parametrize(("targets", "predicted", "expected"), SEQEVAL)
def test_f1_of_spans_is_seqeval_s(targets: str, predicted: str, expected: float) -> None:
    texts = ([text.split() for text in side.split("|")] for side in (targets, predicted))
    assert metrics.span_f1(*texts) == pytest.approx(expected, abs=1e-12)


def test_f1_of_spans_is_seqeval_s_on_random_tags() -> None:
    """300 texts of up to 12 words in BIOES with types of their own or none, four in ten drawn anew."""
    draw = random.Random(11)
    kinds = [f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC", "A-B")]
    tags = ["O", "O", *kinds, "B", "I", "E", "S"]
    targets = [[draw.choice(tags) for _ in range(1 + draw.randrange(12))] for _ in range(300)]
    predicted = [[tag if draw.random() < 0.6 else draw.choice(tags) for tag in text] for text in targets]
    assert metrics.span_f1(targets, predicted) == pytest.approx(0.6437177280550774, abs=1e-15)


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
