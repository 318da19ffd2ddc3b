"""Metrics of tasks, as the field's libraries define them, with bootstrap intervals. Free of training."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError

Classes = NDArray[np.int64]
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95


def _sklearn_metrics() -> Any:
    try:
        from sklearn import metrics
    except ImportError:
        raise MegatfmError(
            "metrics of tasks are computed by scikit-learn: `pip install megatfm[tasks]`"
        ) from None
    return metrics


def accuracy(targets: Classes, predicted: Classes) -> float:
    """Share of examples whose class is predicted."""
    return float(np.mean(targets == predicted))


def f1(targets: Classes, predicted: Classes) -> float:
    """F1 of class 1, the positive one of two; with more classes, the mean over classes, weighted by their examples."""
    average = "binary" if max(targets.max(initial=0), predicted.max(initial=0)) < 2 else "weighted"
    return float(_sklearn_metrics().f1_score(targets, predicted, average=average, zero_division=0.0))


def f1_macro(targets: Classes, predicted: Classes) -> float:
    """Mean of the classes' F1, over the classes that occur."""
    return float(_sklearn_metrics().f1_score(targets, predicted, average="macro", zero_division=0.0))


def matthews(targets: Classes, predicted: Classes) -> float:
    """Matthews correlation coefficient (CoLA's metric)."""
    return float(_sklearn_metrics().matthews_corrcoef(targets, predicted))


CLASSIFICATION: dict[str, Callable[[Classes, Classes], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1_macro": f1_macro,
    "matthews": matthews,
}


def classification_metrics(targets: Classes, predicted: Classes) -> dict[str, float]:
    """Return every metric of classification."""
    return {name: metric(targets, predicted) for name, metric in CLASSIFICATION.items()}


def bootstrap_interval(
    metric: Callable[[Classes, Classes], float],
    targets: Classes,
    predicted: Classes,
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


def confusion_matrix(targets: Classes, predicted: Classes, classes: int) -> list[list[int]]:
    """Return counts [target][predicted]."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (targets, predicted), 1)
    rows: list[list[int]] = counts.tolist()
    return rows


def per_class_scores(
    targets: Classes, predicted: Classes, labels: Sequence[str]
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
