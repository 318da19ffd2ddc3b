"""From likelihoods and texts of a model to the metrics of an evaluation task: for each question, then over all."""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatfm.tasks.metrics import bootstrap_interval
from megatfm.tasks.questions import EvaluationTask, Question, answer_bytes

Values = dict[str, float]
"""Metric → its value for one question."""
BITS, BYTES, NATS = "bits", "bytes", "nats"
"""Of the right answer: not averaged over questions, but put into ratios of sums."""


@dataclass(frozen=True)
class AnswerLikelihoods:
    """For each answer of a question: log p(answer | prompt) in nats and the number of its tokens.

    is_greedy: whether the answer's tokens are the likeliest ones. unconditional: log p(answer | unconditional prompt).
    """

    log_probabilities: Sequence[float]
    n_tokens: Sequence[int]
    is_greedy: Sequence[bool] = ()
    unconditional: Sequence[float] = ()


@dataclass(frozen=True)
class QuestionResult:
    """What a model did with a question: metrics of it, and a record for the file of predictions."""

    values: Values
    record: Mapping[str, Any]


def score_choices(question: Question, scored: AnswerLikelihoods, delimiter: str) -> QuestionResult:
    """Compare the answers of a question; of equal ones the first wins.

    accuracy: by the likelihood. accuracy_per_token, accuracy_per_byte: by it over the answer's tokens or UTF-8 bytes.
    accuracy_pmi: by it over that without the question.
    """
    log_probabilities = np.array(scored.log_probabilities)
    n_bytes = answer_bytes(question, delimiter)
    by_metric = {
        "accuracy": log_probabilities,
        "accuracy_per_token": log_probabilities / np.array(scored.n_tokens),
        "accuracy_per_byte": log_probabilities / np.array(n_bytes),
    }
    if scored.unconditional:
        by_metric["accuracy_pmi"] = log_probabilities - np.array(scored.unconditional)
    chosen = {metric: int(numbers.argmax()) for metric, numbers in by_metric.items()}
    values = {metric: float(number == question.right) for metric, number in chosen.items()}
    record = {
        "row": question.number + 1,
        "right": question.right,
        "chosen": chosen,
        "log_probabilities": list(scored.log_probabilities),
    }
    return QuestionResult(values | _code_length(question, scored, n_bytes), record)


def score_cloze(question: Question, scored: AnswerLikelihoods, delimiter: str) -> QuestionResult:
    """accuracy: whether the model's likeliest tokens are the answer's, one after another."""
    values = {"accuracy": float(scored.is_greedy[0])}
    record = {
        "row": question.number + 1,
        "is_greedy": bool(scored.is_greedy[0]),
        "log_probability": scored.log_probabilities[0],
    }
    return QuestionResult(values | _code_length(question, scored, answer_bytes(question, delimiter)), record)


def _code_length(question: Question, scored: AnswerLikelihoods, n_bytes: Sequence[int]) -> Values:
    nats = -scored.log_probabilities[question.right]
    return {BITS: nats / math.log(2), BYTES: float(n_bytes[question.right]), NATS: nats}


def score_text(question: Question, text: str) -> QuestionResult:
    """exact_match, f1: the best over the accepted answers, as SQuAD 1.1 compares them (Rajpurkar et al. 2016)."""
    values = {
        metric: max(compare(accepted, text) for accepted in question.accepted)
        for metric, compare in TEXT_METRICS.items()
    }
    return QuestionResult(values, {"row": question.number + 1, "text": text, **values})


def normalise_answer(text: str) -> str:
    """Lower-case text without punctuation, English articles and needless spaces; punctuation of all scripts."""
    letters = "".join(
        character
        for character in text.lower()
        if character not in string.punctuation and not unicodedata.category(character).startswith("P")
    )
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def _exact_match(expected: str, text: str) -> float:
    return float(normalise_answer(expected) == normalise_answer(text))


def _word_f1(expected: str, text: str) -> float:
    """F1 of the words that both texts have."""
    words, text_words = normalise_answer(expected).split(), normalise_answer(text).split()
    if not words or not text_words:
        return float(words == text_words)
    common = sum((Counter(words) & Counter(text_words)).values())
    return 2 * common / (len(words) + len(text_words))


TEXT_METRICS: Mapping[str, Callable[[str, str], float]] = {"exact_match": _exact_match, "f1": _word_f1}


def summarise_results(task: EvaluationTask, results: Sequence[QuestionResult]) -> dict[str, Any]:
    """Return metrics over all questions, with bootstrap intervals of those that are means.

    bits_per_byte: of the right answers, bits of all over bytes of all. perplexity, of a cloze: exp of the mean nats of
    an answer. Sums are exact, and so depend on no order.
    """
    columns = {name: [result.values[name] for result in results] for name in results[0].values}
    means = {name: column for name, column in columns.items() if name not in (BITS, BYTES, NATS)}
    metrics = {name: math.fsum(column) / len(column) for name, column in means.items()}
    if BITS in columns:
        metrics["bits_per_byte"] = math.fsum(columns[BITS]) / math.fsum(columns[BYTES])
    if task.config.kind == "cloze":
        metrics["perplexity"] = math.exp(min(math.fsum(columns[NATS]) / len(results), 700.0))
    intervals = {
        name: bootstrap_interval(lambda _, values: float(values.mean()), np.array(column), np.array(column))
        for name, column in means.items()
    }
    return {
        "kind": task.config.kind,
        "fingerprint": task.fingerprint,
        "questions": len(results),
        "metrics": metrics,
        "intervals": intervals,
    }
