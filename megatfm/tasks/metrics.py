"""Metrics of tasks with bootstrap intervals: of classes and values, and of texts.

Classes and values are scored as scikit-learn and seqeval define it: targets and predictions are arrays over examples,
of classes [N], flags [N, C] of multilabel tasks, or values [N]. Texts are scored by SQuAD's exact match and F1, and by
BLEU and chrF as sacrebleu computes them.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError

Values = NDArray[Any]
Metric = Callable[[Values, Values], float]
"""Targets, predictions → value."""
BOOTSTRAP_SAMPLES = 1000
CONFIDENCE = 0.95
CALIBRATION_BINS = 15
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)
"""Parts of texts that SQuAD's metrics ignore."""


def _import_sklearn_metrics() -> Any:
    try:
        from sklearn import metrics
    except ImportError:
        raise MegatfmError("metrics of tasks are computed by scikit-learn: `pip install megatfm[tasks]`") from None
    return metrics


def are_finite(logits: Values) -> bool:
    """Return whether logits [N, C] predict anything: numbers below infinity, and in each row one above −∞, which stands
    for a missing choice."""
    return bool((logits < np.inf).all() and (logits > -np.inf).any(-1).all())


def refuse_broken_logits(logits: Values) -> None:
    """Raise MegatfmError for logits from which nothing can be predicted."""
    if not are_finite(logits):
        raise MegatfmError(
            "logits are not finite: the weights are, or the training was, broken; use an earlier checkpoint"
        )


def compute_perplexity(nats: float) -> float:
    """Return exp of a mean loss in nats; infinity beyond the range of floats, a loss of 709."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def accuracy(targets: Values, predicted: Values) -> float:
    """Share of examples whose class is predicted."""
    return float(np.mean(targets == predicted))


def f1(targets: Values, predicted: Values) -> float:
    """Mean F1 of the classes, weighted by their number of examples."""
    return float(_import_sklearn_metrics().f1_score(targets, predicted, average="weighted", zero_division=0.0))


def binary_f1(targets: Values, predicted: Values) -> float:
    """F1 of class 1 of two."""
    return float(_import_sklearn_metrics().f1_score(targets, predicted, average="binary", zero_division=0.0))


def f1_macro(targets: Values, predicted: Values) -> float:
    """Mean F1 of the classes: over all columns of flags, else over the classes that occur."""
    if targets.ndim == 2 and targets.shape[1] == 1:
        return binary_f1(targets[:, 0], predicted[:, 0])
    return float(_import_sklearn_metrics().f1_score(targets, predicted, average="macro", zero_division=0.0))


def f1_micro(targets: Values, predicted: Values) -> float:
    """F1 over all decisions of all classes."""
    if targets.ndim == 2:  # in one column, scikit-learn would see two classes, and count right zeros
        return binary_f1(targets.ravel(), predicted.ravel())
    return float(_import_sklearn_metrics().f1_score(targets, predicted, average="micro", zero_division=0.0))


def matthews(targets: Values, predicted: Values) -> float:
    """Return Matthews' correlation coefficient (CoLA's metric); 0 where one side has one class."""
    if len(np.union1d(targets, predicted)) < 2:
        return 0.0  # scikit-learn says so with a warning
    return float(_import_sklearn_metrics().matthews_corrcoef(targets, predicted))


def subset_accuracy(targets: Values, predicted: Values) -> float:
    """Share of examples [N, C] all of whose flags are predicted."""
    return float(np.mean((targets == predicted).all(-1)))


def pearson(targets: Values, predicted: Values) -> float:
    """Pearson's correlation; 0 where targets or predictions are constant."""
    if np.ptp(targets) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(np.corrcoef(targets, predicted)[0, 1])


def spearman(targets: Values, predicted: Values) -> float:
    """Spearman's rank correlation: Pearson's correlation of ranks; ties get their mean rank."""
    return pearson(_rank_values(targets), _rank_values(predicted))


def r2(targets: Values, predicted: Values) -> float:
    """Coefficient of determination; 0 for fewer than two examples."""
    return float(_import_sklearn_metrics().r2_score(targets, predicted)) if len(targets) > 1 else 0.0


def _rank_values(values: Values) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return means


FORM_METRICS: Mapping[str, Mapping[str, Metric]] = {
    "classification": {"accuracy": accuracy, "f1": f1, "f1_macro": f1_macro, "matthews": matthews},
    "multilabel": {"f1_micro": f1_micro, "f1_macro": f1_macro, "exact_match": subset_accuracy},
    "regression": {"pearson": pearson, "spearman": spearman, "r2": r2},
    "tagging": {"accuracy": accuracy, "f1_macro": f1_macro},
    "multiple_choice": {"accuracy": accuracy},
}
"""Form of task → its metrics by name, over examples; for tagging, over words."""


def list_metrics(task: TaskConfig) -> Mapping[str, Metric]:
    """Return a task's metrics by name. With two labels, F1 is that of the second, whichever ones a file has."""
    metrics = FORM_METRICS[task.form]
    return {**metrics, "f1": binary_f1} if "f1" in metrics and len(task.labels) == 2 else metrics


def span_f1(targets: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """F1 of complete spans of tags such as B-PER and I-PER, over all texts (conlleval, seqeval)."""
    expected, detected = (
        {(text_index, *span) for text_index, tags in enumerate(texts) for span in find_tag_spans(tags)}
        for texts in (targets, predicted)
    )
    return 2 * len(expected & detected) / max(len(expected) + len(detected), 1)


def find_tag_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, end) of each span of BIO or BIOES tags. An I- without a B- begins a span."""
    spans, start, previous_prefix, previous_type = [], 0, "O", ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, span_type = tag.partition("-")
        begins = prefix in ("B", "S") or previous_prefix in ("O", "E", "S") or span_type != previous_type
        if previous_prefix != "O" and (prefix == "O" or begins):
            spans.append((previous_type, start, index))
        if prefix != "O" and begins:
            start = index
        previous_prefix, previous_type = prefix, span_type
    return spans


def calibration_error(targets: Values, probabilities: Values, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error (Guo et al. 2017, equation 3). targets [N], probabilities [N, C].

    Examples are binned by the probability of the predicted class. The error is the mean distance of a bin's
    probability from its accuracy, weighted by the bin's examples.
    """
    confidence, hits = probabilities.max(1), probabilities.argmax(1) == targets
    bin_indices = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    distance = np.bincount(bin_indices, hits - confidence, bins)
    return float(np.abs(distance).sum() / len(targets))


def bootstrap_interval(
    metric: Metric,
    targets: Values,
    predicted: Values,
    *,
    samples: int = BOOTSTRAP_SAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile interval (low, high) of a metric over resampled examples (Efron 1979)."""
    random, n = np.random.default_rng(seed), len(targets)
    draws = (random.integers(0, n, n) for _ in range(samples))  # one at a time, for files of millions of rows
    values = [metric(targets[chosen], predicted[chosen]) for chosen in draws]
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mean_interval(values: Values) -> tuple[float, float]:
    """Return the bootstrap interval (low, high) of the mean of values [N]."""
    return bootstrap_interval(lambda values, _: float(values.mean()), values, values)


def confusion_matrix(targets: Values, predicted: Values, classes: int) -> list[list[int]]:
    """Return counts [target][predicted]."""
    counts = np.bincount(targets * classes + predicted, minlength=classes**2)
    rows: list[list[int]] = counts.reshape(classes, classes).tolist()
    return rows


def compute_class_scores(targets: Values, predicted: Values, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return label → precision, recall, F1 and number of examples."""
    columns = _import_sklearn_metrics().precision_recall_fscore_support(
        targets, predicted, labels=range(len(labels)), zero_division=0.0
    )
    names = ("precision", "recall", "f1", "examples")
    return {
        label: {name: float(column[class_index]) for name, column in zip(names, columns, strict=True)}
        for class_index, label in enumerate(labels)
    }


def normalise_answer(text: str) -> str:
    """Return a text in small letters, without punctuation of ASCII, English articles and surplus white space."""
    bare = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if an answer is one of the references once both are normalised (SQuAD), else 0."""
    return float(any(normalise_answer(answer) == normalise_answer(reference) for reference in references))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Largest F1 of an answer's words and those of a reference, both normalised (SQuAD)."""
    return max(_compute_word_f1(normalise_answer(answer).split(), normalise_answer(r).split()) for r in references)


def _compute_word_f1(predicted: Sequence[str], reference: Sequence[str]) -> float:
    if not predicted or not reference:
        return float(predicted == reference)
    common = sum((Counter(predicted) & Counter(reference)).values())
    return 2 * common / (len(predicted) + len(reference))


def find_best_threshold(
    scores: NDArray[np.float64], has_answer: NDArray[np.bool_], differences: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the best mean score over thresholds, and that threshold (SQuAD 2.0's evaluation script).

    scores [N]: of the best answers, where the question has one. differences [N]: score of no answer minus that of the
    best answer; a question above the threshold gets no answer.
    """
    score = best = float((~has_answer).sum())
    threshold, order = 0.0, np.argsort(differences, kind="stable").tolist()
    for index in order:
        score += float(scores[index]) if has_answer[index] else -1.0
        if score > best:
            best, threshold = score, float(differences[index])
    return best / max(len(scores), 1), threshold


def compute_text_metric(
    name: str, answers: Sequence[str], references: Sequence[str]
) -> tuple[float, tuple[float, float]]:
    """Return a metric of generated texts and its 95 % bootstrap interval: BLEU and chrF of 100, exact match of 1."""
    if name == "exact_match":
        hits = np.array([a.strip() == r.strip() for a, r in zip(answers, references, strict=True)], np.float64)
        return float(hits.mean()), mean_interval(hits)
    metric = _make_sacrebleu_metric(name)
    from sacrebleu.significance import _bootstrap_resample

    statistics = metric._extract_corpus_statistics(list(answers), [list(references)])
    _, samples = _bootstrap_resample(statistics, metric, BOOTSTRAP_SAMPLES)
    scores = sorted(float(sample.score) for sample in samples)
    outside = len(scores) // 40  # sacrebleu's bounds; its mean ± half of their distance may lie below 0
    interval = scores[outside], scores[-1 - outside]
    return float(metric._aggregate_and_compute(statistics).score), interval


def get_metric_signature(name: str) -> str:
    """Return what names a metric's settings in papers; of exact match its name."""
    return name if name == "exact_match" else str(_make_sacrebleu_metric(name, score_once=True).get_signature())


def _make_sacrebleu_metric(name: str, *, score_once: bool = False) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MegatfmError(
            f"task.text_metrics: {name} is computed by sacrebleu: `pip install megatfm[tasks]`"
        ) from None
    metric = BLEU() if name == "bleu" else CHRF()
    if score_once:  # before which a metric doesn't know how many references there are
        metric.corpus_score(["a"], [["a"]])
    return metric
