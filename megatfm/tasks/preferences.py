"""Preference files: a prompt, a chosen and a rejected answer, as texts or as messages of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.tasks.answers import AnswerEncoder, Spans
from megatfm.tasks.chat import ASSISTANT
from megatfm.tasks.files import Row, require_columns
from megatfm.tasks.forms import EncodedExample
from megatfm.tokenizers import Tokenizer

SIDES = ("chosen", "rejected")
LogProbabilities = Callable[[Sequence[tuple[NDArray[np.int64], tuple[int, int]]]], Sequence[float]]
"""Sequences of tokens, each with begin and end of the answer in it → log-probabilities of the answers."""


@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes the rows of one file as pairs: the chosen sequence, then the rejected one, each prompt and answer.

    length: tokens of a row, which a pair must fit; the last token of each sequence is only a target. reference: gives
    the log-probabilities that the model at the start has for answers.
    """

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    tokenizer_file: str
    length: int
    reference: LogProbabilities

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return pairs, and what to say of them. Raises UsageError that names the row."""
        task = self.task
        require_columns(self.path, rows, {"task.chosen": task.chosen, "task.rejected": task.rejected})
        encoded = {side: self._encode_side(rows, side) for side in SIDES}
        examples = []
        for number, pair in enumerate(zip(encoded["chosen"], encoded["rejected"], strict=True), start=1):
            (chosen, (begin, end), n_chosen), (rejected, (other_begin, other_end), n_rejected) = pair
            if np.array_equal(chosen, rejected):
                self._answers().refuse(number, "both answers are the same: take the row out")
            needed = len(chosen) + len(rejected) - 2
            if needed > self.length:
                self._answers().refuse(
                    number,
                    f"has {needed} tokens in both sequences, more than data.sequence_length = {self.length}: choose "
                    f"{needed} or more, or take the row out; pairs are not cut",
                )
            at = len(chosen)
            spans = [[begin, end], [at + other_begin, at + other_end]]
            tokens = np.concatenate([chosen, rejected])
            examples.append(EncodedExample(tokens, n_chosen + n_rejected, {"trained": spans, "second": at}))
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

    def _encode_side(
        self, rows: Sequence[Row], side: str
    ) -> list[tuple[NDArray[np.int64], tuple[int, int], int]]:
        """Return tokens, the answer's place and bytes of each row's chosen or rejected sequence."""
        column, prompt = getattr(self.task, side), self.task.prompt
        is_chat = any(isinstance(row.get(column), list) for row in rows)
        encoder = self._answers()
        if is_chat:
            messages = [
                {encoder.task.messages: self._messages(number, row, column)}
                for number, row in enumerate(rows, 1)
            ]
            encoded = encoder.encode_chats(messages)
        else:
            require_columns(self.path, rows, {"task.prompt": prompt})
            task = encoder.task.model_copy(update={"text": prompt, "label": column})
            encoded = replace(encoder, task=task).encode_prompts(rows)
        return [(tokens, _last(spans, len(tokens)), n_bytes) for tokens, spans, n_bytes in encoded]

    def _messages(self, number: int, row: Row, column: str) -> list[Any]:
        """Return the conversation of a row that ends in the answer of a column."""
        before, answer = row.get(self.task.prompt), row.get(column)
        if not isinstance(answer, list) or not answer:
            self._answers().refuse(
                number, f"column {column!r} is no list of messages, as in other rows: give one"
            )
        assert isinstance(answer, list)
        messages = [*(before if isinstance(before, list) else []), *answer]
        if not isinstance(messages[-1], dict) or messages[-1].get("role") != ASSISTANT:
            self._answers().refuse(
                number, f"the last message of column {column!r} is not the assistant's: end with the answer"
            )
        return messages

    def _answers(self) -> AnswerEncoder:
        return AnswerEncoder(self.path, self.task, self.tokenizer, self.tokenizer_file, self.length)


def _last(spans: Spans, n_tokens: int) -> tuple[int, int]:
    """Return the place of the last answer; the first token is predicted by none."""
    begin, end = spans[-1]
    return max(begin, 1), min(end, n_tokens)
