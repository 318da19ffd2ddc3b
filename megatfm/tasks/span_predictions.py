"""Answers from the logits of windows: the best span over windows, or no answer (Devlin et al. 2019, section 4.3)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.corpus.corpus import Corpus
from megatfm.objectives.supervised import ANNOTATION
from megatfm.tasks.metrics import are_finite, exact_match, find_best_threshold, refuse_broken_logits, token_f1

SHOWN_ANSWERS = 5
"""Number of further answers in a line of the predictions file."""


@dataclass(frozen=True)
class AnswerCandidate:
    """An answer: its characters [begin, end) in the text, and the sum of its start and end logits."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class QuestionAnswers:
    """A question's candidate answers, best first, and the score of no answer.

    references: the file's answers; empty: the question has none.
    """

    row: int
    name: str
    context: str
    references: Sequence[str]
    candidates: Sequence[AnswerCandidate]
    null_score: float

    @property
    def difference(self) -> float:
        """Score of no answer minus that of the best one; infinite without candidates."""
        return self.null_score - self.candidates[0].score if self.candidates else float("inf")

    def text(self, candidate: AnswerCandidate) -> str:
        """Return an answer's text."""
        return self.context[candidate.begin : candidate.end].strip()

    @cached_property
    def best(self) -> str:
        """The best answer; empty where no window has one."""
        return self.text(self.candidates[0]) if self.candidates else ""


@dataclass(frozen=True)
class SpanPredictions:
    """Answers to a file's questions, from start and end logits [N, 2] of tokens.

    examples: each token's window [N]; words: its index in the window [N]. threshold: a question is answered if
    `QuestionAnswers.difference` is at most this; None: choose the threshold with the best F1 on these questions.
    """

    task: TaskConfig
    corpus: str
    examples: NDArray[np.int64]
    words: NDArray[np.int64]
    logits: NDArray[np.float32]
    threshold: float | None = None

    @cached_property
    def questions(self) -> list[QuestionAnswers]:
        """The questions with predicted windows, in the order of the file."""
        numbers, starts = np.unique(self.examples, return_index=True)
        logits_by_window = dict(zip(numbers.tolist(), np.split(self.logits, starts[1:]), strict=True))
        by_row: dict[int, list[tuple[dict[str, Any], NDArray[np.float32]]]] = {}
        question_fields: dict[int, dict[str, Any]] = {}
        for number, annotation in read_annotations(self.corpus):
            row = annotation["row"]
            if "context" in annotation:  # first window
                question_fields[row] = annotation
            if number in logits_by_window:
                by_row.setdefault(row, []).append((annotation, logits_by_window[number]))
        return [self._answer_question(row, question_fields[row], windows) for row, windows in sorted(by_row.items())]

    def metrics(self) -> dict[str, float]:
        """Return SQuAD's F1 and exact match; with `no_answer`, also over questions with and without an answer.

        They are NaN if the logits are not finite.
        """
        if not are_finite(self.logits):
            return dict.fromkeys(replace(self, logits=np.zeros_like(self.logits)).metrics(), math.nan)
        exact, f1 = self.scores(exact_match), self.scores(token_f1)
        values = {"f1": float(f1.mean()), "exact_match": float(exact.mean())}
        if not self.task.no_answer:
            return values
        has_answer = self._has_answer
        for name, chosen in (("has_answer", has_answer), ("no_answer", ~has_answer)):
            if chosen.any():
                values |= {f"{name}_f1": float(f1[chosen].mean()), f"{name}_exact_match": float(exact[chosen].mean())}
        return values

    def scores(self, metric: Any) -> NDArray[np.float64]:
        """Return a metric of each question's answer [Q], given under the threshold."""
        answers = [self.answer(question) for question in self.questions]
        return np.array(
            [
                metric(answer, question.references or [""])
                for answer, question in zip(answers, self.questions, strict=True)
            ],
            np.float64,
        )

    @cached_property
    def answered_up_to(self) -> float:
        """`threshold`, or else the one with the best F1 here; infinite where every question has an answer."""
        if not self.task.no_answer:
            return float("inf")
        if self.threshold is not None:
            return self.threshold
        f1 = np.array([token_f1(q.best, q.references or [""]) for q in self.questions])
        differences = np.array([question.difference for question in self.questions])
        return find_best_threshold(f1, self._has_answer, differences)[1]

    def answer(self, question: QuestionAnswers) -> str:
        """Return the answer to a question; empty where it has none."""
        return question.best if question.difference <= self.answered_up_to else ""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over the lines of the predictions file. `row` counts the file's rows from 1.

        Raises MegatfmError if the logits are not finite.
        """
        refuse_broken_logits(self.logits)
        for question in self.questions:
            best = question.candidates[: 1 + SHOWN_ANSWERS]
            scores = np.array([candidate.score for candidate in best], np.float64)
            shares = np.exp(scores - scores.max(initial=-np.inf))
            shares = shares / max(shares.sum(), 1e-300)
            answers = [
                {"text": question.text(c), "begin": c.begin, "end": c.end, "probability": round(float(share), 6)}
                for c, share in zip(best, shares, strict=True)
            ]
            line: dict[str, Any] = {"row": question.row + 1, "id": question.name, "answer": self.answer(question)}
            if self.task.no_answer:
                line["no_answer_score"] = round(question.difference, 6) if best else None
            yield {**line, "answers": answers}

    @cached_property
    def _has_answer(self) -> NDArray[np.bool_]:
        return np.array([bool(question.references) for question in self.questions], np.bool_)

    def _answer_question(
        self,
        row: int,
        question_fields: Mapping[str, Any],
        windows: Sequence[tuple[Mapping[str, Any], NDArray[np.float32]]],
    ) -> QuestionAnswers:
        begins = [annotation["window"][0] for annotation, _ in windows]
        sizes = [len(annotation["offsets"]) for annotation, _ in windows]
        best: dict[tuple[int, int], float] = {}
        null = float("inf")
        for window, (annotation, logits) in enumerate(windows):
            null = min(null, float(logits[0].astype(np.float64).sum()))
            for begin, end, score in self._iter_candidates(window, annotation, logits, begins, sizes):
                best[begin, end] = max(best.get((begin, end), -np.inf), score)
        ordered = sorted(best.items(), key=lambda item: (-item[1], item[0]))[: self.task.n_best]
        candidates = [AnswerCandidate(*span, score) for span, score in ordered]
        return QuestionAnswers(
            row, question_fields["id"], question_fields["context"], question_fields["answers"], candidates, null
        )

    def _iter_candidates(
        self, window: int, annotation: Mapping[str, Any], logits: NDArray[np.float32], begins: Sequence[int],
        sizes: Sequence[int],
    ) -> Iterator[tuple[int, int, float]]:  # fmt: skip
        """Iterate over (begin, end, score) of a window's answers.

        A start token counts only in the window that shows most of its context.
        """
        offsets = np.array(annotation["offsets"]).reshape(-1, 2)
        text_logits = logits[annotation["first"] :][: len(offsets)].astype(np.float64)
        starts, ends = (_find_largest(text_logits[:, side], self.task.n_best) for side in (0, 1))
        for start in starts:
            if shows_most_context(window, begins[window] + start, begins, sizes):
                for end in ends:
                    if start <= end < start + self.task.max_answer_tokens:
                        score = float(text_logits[start, 0] + text_logits[end, 1])
                        yield int(offsets[start, 0]), int(offsets[end, 1]), score


def shows_most_context(window: int, token: int, begins: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a window is the first with the most context around a token.

    Context is the smaller of both sides, plus 0.01 of the window's length (BERT's `_check_is_max_context`).
    begins, sizes: first token and number of tokens of each window.
    """
    scores = [
        min(token - begin, begin + size - 1 - token) + 0.01 * size if begin <= token < begin + size else -np.inf
        for begin, size in zip(begins, sizes, strict=True)
    ]
    return int(np.argmax(scores)) == window


def _find_largest(values: NDArray[np.float64], n: int) -> list[int]:
    """Return the indices of the n largest values; the first of equal ones."""
    indices: list[int] = np.argsort(-values, kind="stable")[:n].tolist()
    return indices


def read_annotations(folder: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over (index, annotation) of the samples of a task's corpus."""
    corpus = Corpus.open(folder)
    for block in range(corpus.n_blocks):
        for sample in corpus.read_block_samples(block):
            yield sample.index, json.loads(sample.members[ANNOTATION])
