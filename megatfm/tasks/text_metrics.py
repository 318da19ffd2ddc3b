"""Metrics of texts: SQuAD's exact match and F1, and BLEU and chrF as sacrebleu computes them."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError
from megatfm.tasks.metrics import BOOTSTRAP_SAMPLES, mean_interval

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)


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
