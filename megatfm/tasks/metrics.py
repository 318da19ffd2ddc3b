"""Metrics of tasks, as the field's libraries define them, with bootstrap intervals. Free of training.

Numbers come as arrays over examples: classes [N], flags [N, C] of tasks with many labels, or values [N].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError

Numbers = NDArray[Any]
Metric = Callable[[Numbers, Numbers], float]
"""Targets, predictions → value."""
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95
CALIBRATION_BINS = 15


def _sklearn_metrics() -> Any:
    try:
        from sklearn import metrics
    except ImportError:
        raise MegatfmError(
            "metrics of tasks are computed by scikit-learn: `pip install megatfm[tasks]`"
        ) from None
    return metrics


def accuracy(targets: Numbers, predicted: Numbers) -> float:
    """Share of examples whose class is predicted."""
    return float(np.mean(targets == predicted))


def f1(targets: Numbers, predicted: Numbers) -> float:
    """F1 of class 1, the positive one of two; with more classes, the mean over classes, weighted by their examples."""
    average = "binary" if max(targets.max(initial=0), predicted.max(initial=0)) < 2 else "weighted"
    return float(_sklearn_metrics().f1_score(targets, predicted, average=average, zero_division=0.0))


def f1_macro(targets: Numbers, predicted: Numbers) -> float:
    """Mean of the classes' F1; of flags over all classes, else over those that occur."""
    return float(_sklearn_metrics().f1_score(targets, predicted, average="macro", zero_division=0.0))


def f1_micro(targets: Numbers, predicted: Numbers) -> float:
    """F1 over all decisions of all classes."""
    return float(_sklearn_metrics().f1_score(targets, predicted, average="micro", zero_division=0.0))


def matthews(targets: Numbers, predicted: Numbers) -> float:
    """Matthews correlation coefficient (CoLA's metric)."""
    return float(_sklearn_metrics().matthews_corrcoef(targets, predicted))


def exact_match(targets: Numbers, predicted: Numbers) -> float:
    """Share of examples [N, C] all of whose flags are predicted."""
    return float(np.mean((targets == predicted).all(-1)))


def pearson(targets: Numbers, predicted: Numbers) -> float:
    """Pearson's correlation; 0 where one side is constant."""
    if np.ptp(targets) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(np.corrcoef(targets, predicted)[0, 1])


def spearman(targets: Numbers, predicted: Numbers) -> float:
    """Spearman's rank correlation: Pearson's of ranks, ties by their mean rank."""
    return pearson(_ranks(targets), _ranks(predicted))


def r2(targets: Numbers, predicted: Numbers) -> float:
    """Coefficient of determination."""
    return float(_sklearn_metrics().r2_score(targets, predicted)) if len(targets) > 1 else 0.0


def _ranks(values: Numbers) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return means


METRICS_OF_FORM: Mapping[str, Mapping[str, Metric]] = {
    "classification": {"accuracy": accuracy, "f1": f1, "f1_macro": f1_macro, "matthews": matthews},
    "multilabel": {"f1_micro": f1_micro, "f1_macro": f1_macro, "exact_match": exact_match},
    "regression": {"pearson": pearson, "spearman": spearman, "r2": r2},
    "tagging": {"accuracy": accuracy, "f1_macro": f1_macro},
    "multiple_choice": {"accuracy": accuracy},
}
"""Metrics of each form over its examples, or over words."""


def span_f1(targets: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """F1 of whole spans of tags such as B-PER and I-PER, over all texts, as conlleval and seqeval count them."""
    expected, detected = (
        {(number, *span) for number, tags in enumerate(texts) for span in spans_of(tags)}
        for texts in (targets, predicted)
    )
    return 2 * len(expected & detected) / max(len(expected) + len(detected), 1)


def spans_of(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return type, first word and end of each span of BIO or BIOES tags. An I- without a beginning begins a span."""
    spans, start, before, kind_before = [], 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        begins = mark in ("B", "S") or before in ("O", "E", "S") or kind != kind_before
        if before != "O" and (mark == "O" or begins):
            spans.append((kind_before, start, place))
        if mark != "O" and begins:
            start = place
        before, kind_before = mark, kind
    return spans


def calibration_error(targets: Numbers, probabilities: Numbers, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: over bins of the predicted class's probability, the mean distance of that from the
    accuracy, weighted by examples (Guo et al. 2017, equation 3). targets [N], probabilities [N, C]."""
    confidence, hits = probabilities.max(1), probabilities.argmax(1) == targets
    numbers = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    distance = np.bincount(numbers, hits - confidence, bins)
    return float(np.abs(distance).sum() / len(targets))


def bootstrap_interval(
    metric: Metric,
    targets: Numbers,
    predicted: Numbers,
    *,
    samples: int = BOOTSTRAP_SAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile interval of a metric over resampled examples (Efron 1979)."""
    random, n = np.random.default_rng(seed), len(targets)
    values = [metric(targets[chosen], predicted[chosen]) for chosen in random.integers(0, n, (samples, n))]
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def confusion_matrix(targets: Numbers, predicted: Numbers, classes: int) -> list[list[int]]:
    """Return counts [target][predicted]."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (targets, predicted), 1)
    rows: list[list[int]] = counts.tolist()
    return rows


def per_class_scores(
    targets: Numbers, predicted: Numbers, labels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and number of examples of each class, by its label."""
    columns = _sklearn_metrics().precision_recall_fscore_support(
        targets, predicted, labels=range(len(labels)), zero_division=0.0
    )
    names = ("precision", "recall", "f1", "examples")
    return {
        label: {name: float(column[number]) for name, column in zip(names, columns, strict=True)}
        for number, label in enumerate(labels)
    }
