"""Metrics of an evaluation task from a model's likelihoods and texts: by question, then over all questions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatfm.tasks.metrics import compute_perplexity, exact_match, mean_interval, token_f1
from megatfm.tasks.questions import EvaluationTask, Question, TextPair, count_answer_bytes, list_question_pairs

MetricValues = dict[str, float]
"""Metric → its value for one question."""
SUMMED_METRICS = BITS, BYTES, NATS = "bits", "bytes", "nats"
"""Values of the right answer that are summed over questions instead of averaged."""


@dataclass(frozen=True)
class Likelihood:
    """log p(answer | prompt) in nats, number of tokens, and whether each is the likeliest next one; None: unknown."""

    log_probability: float
    n_tokens: int
    is_greedy: bool | None = None


@dataclass(frozen=True)
class QuestionResult:
    """Metrics of a question, and its record for the predictions file."""

    values: MetricValues
    record: Mapping[str, Any]


def score_choices(
    question: Question, answers: Sequence[Likelihood], delimiter: str, unconditional: Sequence[Likelihood] = ()
) -> QuestionResult:
    """Compare the answers of a question. The first of equal ones wins.

    accuracy: the likeliest answer is right. accuracy_per_token, accuracy_per_byte: by log-probability per token or
    UTF-8 byte of the answer. accuracy_pmi: by log-probability minus that after the unconditional prompt.
    """
    log_probabilities = np.array([answer.log_probability for answer in answers])
    n_bytes = count_answer_bytes(question, delimiter)
    by_metric = {
        "accuracy": log_probabilities,
        "accuracy_per_token": log_probabilities / np.array([answer.n_tokens for answer in answers]),
        "accuracy_per_byte": log_probabilities / np.array(n_bytes),
    }
    if unconditional:
        without = np.array([answer.log_probability for answer in unconditional])
        impossible = np.isneginf(log_probabilities)  # −∞ − (−∞) would be NaN, which argmax prefers
        by_metric["accuracy_pmi"] = log_probabilities - np.where(impossible, 0.0, without)
    chosen = {metric: int(numbers.argmax()) for metric, numbers in by_metric.items()}
    values = {metric: float(number == question.right) for metric, number in chosen.items()}
    record = {
        "row": question.number + 1,
        "right": question.right,
        "chosen": chosen,
        "log_probabilities": log_probabilities.tolist(),
    }
    return QuestionResult(values | _measure_code_length(answers[question.right], n_bytes[question.right]), record)


def score_cloze(question: Question, answer: Likelihood, delimiter: str) -> QuestionResult:
    """Score a cloze. accuracy: every token of the answer is the likeliest next one; left out if unknown."""
    values = {} if answer.is_greedy is None else {"accuracy": float(answer.is_greedy)}
    record = {"row": question.number + 1, "is_greedy": answer.is_greedy, "log_probability": answer.log_probability}
    (n_bytes,) = count_answer_bytes(question, delimiter)
    return QuestionResult(values | _measure_code_length(answer, n_bytes), record)


def _measure_code_length(right: Likelihood, n_bytes: int) -> MetricValues:
    nats = -right.log_probability
    return {BITS: nats / math.log(2), BYTES: float(n_bytes), NATS: nats}


def score_text(question: Question, text: str) -> QuestionResult:
    """exact_match, f1: the best over the accepted answers, as SQuAD 1.1 compares them (Rajpurkar et al. 2016)."""
    values = {"exact_match": exact_match(text, question.accepted), "f1": token_f1(text, question.accepted)}
    return QuestionResult(values, {"row": question.number + 1, "text": text, **values})


def score_rank(question: Question, rank: int) -> QuestionResult:
    """Score a retrieval. recall_at_1, recall_at_10: the right answer is among the nearest 1 or 10.

    rank: of the right answer, from 1. reciprocal_rank: 1 / rank, whose mean is the MRR.
    """
    values = {"recall_at_1": float(rank <= 1), "recall_at_10": float(rank <= 10), "reciprocal_rank": 1 / rank}
    return QuestionResult(values, {"row": question.number + 1, "rank": rank})


def score_questions(task: EvaluationTask, scored: Mapping[TextPair, Likelihood]) -> list[QuestionResult]:
    """Return the results of a task's questions from the likelihoods of its pairs (`questions.list_scored_pairs`)."""
    results, delimiter = [], task.config.delimiter
    for question in task.questions:
        likelihoods = [scored[pair] for pair in list_question_pairs(question)]
        n_answers = len(question.choices)
        answers, unconditional = likelihoods[:n_answers], likelihoods[n_answers:]
        if task.config.kind == "cloze":
            results.append(score_cloze(question, answers[0], delimiter))
        else:
            results.append(score_choices(question, answers, delimiter, unconditional))
    return results


def average_metrics(kind: str, results: Sequence[QuestionResult]) -> dict[str, float]:
    """Return metrics over all questions. Sums are exact, so the order of the questions does not matter.

    bits_per_byte: total bits of the right answers over their total bytes. perplexity (cloze): exp of the mean nats of
    an answer.
    """
    columns = _list_columns(results)
    metrics = {name: math.fsum(column) / len(column) for name, column in columns.items() if name not in SUMMED_METRICS}
    if BITS in columns:
        metrics["bits_per_byte"] = math.fsum(columns[BITS]) / math.fsum(columns[BYTES])
    if kind == "cloze":
        metrics["perplexity"] = compute_perplexity(math.fsum(columns[NATS]) / len(results))
    return metrics


def summarise_results(task: EvaluationTask, results: Sequence[QuestionResult]) -> dict[str, Any]:
    """Return metrics over all questions, with bootstrap intervals for means."""
    intervals = {
        name: mean_interval(np.array(column))
        for name, column in _list_columns(results).items()
        if name not in SUMMED_METRICS
    }
    return {
        "kind": task.config.kind,
        "fingerprint": task.fingerprint,
        "questions": len(results),
        "metrics": average_metrics(task.config.kind, results),
        "intervals": intervals,
    }


def _list_columns(results: Sequence[QuestionResult]) -> dict[str, list[float]]:
    return {name: [result.values[name] for result in results] for name in results[0].values}
