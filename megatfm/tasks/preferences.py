"""Preference files: a prompt, a chosen and a rejected answer, as texts or as messages of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.answers import AnswerEncoder, Spans
from megatfm.tasks.chat import ASSISTANT
from megatfm.tasks.examples import EncodedExample, ExampleFormat
from megatfm.tasks.files import Row, locate_rows, require_columns
from megatfm.tokenizers import Tokenizer

SIDES = ("chosen", "rejected")
LogProbabilities = Callable[[Sequence[tuple[NDArray[np.int64], tuple[int, int]]]], Sequence[float]]
"""(tokens [T], [begin, end) of the answer) of each sequence → log-probabilities of the answers, in nats."""


class ReferenceScorer(Protocol):
    """Scores answers by the model at the start. identity: of that model; another one makes another corpus."""

    @property
    def identity(self) -> str: ...

    def __call__(self, sequences: Sequence[tuple[NDArray[np.int64], tuple[int, int]]]) -> Sequence[float]: ...


@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes the rows of one file as pairs: the chosen sequence, then the rejected one, each prompt and answer.

    A pair must fit a row; the last token of each sequence is only a target. reference: log-probabilities of answers by
    the model at the start.
    """

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    tokenizer_file: str
    reference: LogProbabilities

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return pairs and notes for the log. Raises UsageError that names the row."""
        task = self.task
        require_columns(self.path, rows, {"task.chosen": task.chosen, "task.rejected": task.rejected})
        if any(isinstance(row.get(getattr(task, side)), list) for row in rows for side in SIDES):
            self._check_prompts(rows)
        encoded = {side: self._encode_side(rows, side) for side in SIDES}
        examples = []
        pairs = zip(encoded["chosen"], encoded["rejected"], strict=True)
        for place, pair in locate_rows(self.path, pairs):
            (chosen, (begin, end), n_chosen), (rejected, (rejected_begin, rejected_end), n_rejected) = pair
            if np.array_equal(chosen, rejected):
                raise UsageError(f"{place}: both answers are the same: take the row out")
            needed = len(chosen) + len(rejected) - 2
            if needed > self.example_format.sequence_length:
                raise UsageError(
                    f"{place}: has {needed} tokens in both sequences, more than data.sequence_length = "
                    f"{self.example_format.sequence_length}: choose {needed} or more, or take the row out; pairs are "
                    "not cut"
                )
            rejected_start = len(chosen)
            spans = [[begin, end], [rejected_start + rejected_begin, rejected_start + rejected_end]]
            tokens = np.concatenate([chosen, rejected])
            examples.append(EncodedExample(tokens, n_chosen + n_rejected, {"trained": spans, "second": rejected_start}))
        sequences = [(tokens, span) for side in SIDES for tokens, span, _ in encoded[side]]
        scores = np.array(self.reference(sequences)).reshape(2, len(rows))
        ratios = (scores[0] - scores[1]).tolist()
        annotated = [
            replace(example, annotation={**example.annotation, "reference": ratio})
            for example, ratio in zip(examples, ratios, strict=True)
        ]
        share = float(np.mean(np.array(ratios) > 0)) if ratios else 0.0
        return annotated, [
            f"{self.path}: {100 * share:.0f} % of {len(rows)} chosen answers are the likelier at the start"
        ]

    def _encode_side(self, rows: Sequence[Row], side: str) -> list[tuple[NDArray[np.int64], tuple[int, int], int]]:
        """Return tokens, the answer's span and bytes of each row's chosen or rejected sequence."""
        column, prompt = getattr(self.task, side), self.task.prompt
        is_chat = any(isinstance(row.get(column), list) for row in rows)
        encoder = AnswerEncoder(self.path, self.task, self.tokenizer, self.example_format, self.tokenizer_file)
        if is_chat:
            messages = [
                {encoder.task.messages: self._make_conversation(place, row, column)}
                for place, row in locate_rows(self.path, rows)
            ]
            encoded = encoder.encode_chats(messages)
        else:
            require_columns(self.path, rows, {"task.prompt": prompt})
            task = encoder.task.model_copy(update={"text": prompt, "label": column})
            encoded = replace(encoder, task=task).encode_prompts(rows)
        return [(tokens, _get_last_span(spans, len(tokens)), n_bytes) for tokens, spans, n_bytes in encoded]

    def _check_prompts(self, rows: Sequence[Row]) -> None:
        """Raise UsageError for a row whose answers, as messages, are to different conversations."""
        for place, row in locate_rows(self.path, rows):
            chosen, rejected = (
                [
                    (message.get("role"), message.get("content")) if isinstance(message, dict) else message
                    for message in self._make_conversation(place, row, getattr(self.task, side))[:-1]
                ]
                for side in SIDES
            )
            if chosen != rejected:
                raise UsageError(
                    f"{place}: columns {self.task.chosen!r} and {self.task.rejected!r} differ before their last "
                    "messages, and only answers to one prompt are compared: mend the row, or take it out"
                )

    def _make_conversation(self, place: str, row: Row, column: str) -> list[Any]:
        """Return the conversation of a row that ends in the answer of a column."""
        prompt, answer = row.get(self.task.prompt), row.get(column)
        if not isinstance(answer, list) or not answer:
            raise UsageError(f"{place}: column {column!r} is no list of messages, as in other rows: give one")
        if isinstance(prompt, str) and prompt.strip() and len(answer) == 1:
            raise UsageError(
                f"{place}: column {self.task.prompt!r} is a text, and column {column!r} a list with the answer alone, "
                "so that the prompt would be left out: give the prompt as a list of messages, or both answers as texts"
            )
        if isinstance(prompt, list) and prompt and answer[: len(prompt)] == prompt:
            raise UsageError(
                f"{place}: column {column!r} begins with the messages of column {self.task.prompt!r}, which would be "
                "read twice: take them out of one of the two"
            )
        messages = [*(prompt if isinstance(prompt, list) else []), *answer]
        if not isinstance(messages[-1], dict) or messages[-1].get("role") != ASSISTANT:
            raise UsageError(
                f"{place}: the last message of column {column!r} is not the assistant's: end with the answer"
            )
        return messages


def _get_last_span(spans: Spans, n_tokens: int) -> tuple[int, int]:
    """Return the last answer's span. The first token is left out: no position predicts it."""
    begin, end = spans[-1]
    return max(begin, 1), min(end, n_tokens)
