"""Multiple choice: a row becomes one sequence for each of its choices, after the text they continue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.examples import (
    THREADS,
    EncodedExample,
    ExampleFormat,
    build_frame,
    join_sequences,
    require_tokens,
    truncate_longest,
)
from megatfm.tasks.files import Row, find_class_index, format_label, locate_rows, read_row_text, require_columns
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class ChoiceEncoder:
    """Encodes the rows of one file. with_labels: false for files whose choices are to be predicted.

    An encoder's pair is (text, question and choice), a decoder's (text and question, choice): Radford et al. 2018,
    section 3.3.
    """

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    with_labels: bool

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples and notes for the log. Raises UsageError that names the row."""
        task, length = self.task, self.example_format.sequence_length
        columns = {"task.text": task.text} | ({"task.text_pair": task.text_pair} if task.text_pair else {})
        require_columns(self.path, rows, columns | ({"task.label": task.label} if self.with_labels else {}))
        for column in task.choices:
            require_columns(self.path, rows, {"task.choices": column})
        frame = build_frame(self.tokenizer, self.example_format)
        examples, n_cut = list[EncodedExample](), 0
        for place, row in locate_rows(self.path, rows):
            texts = [read_row_text(place, row, column) for column in columns.values()]
            choices = self._read_choices(place, row)
            label = self._read_label(place, row, len(choices)) if self.with_labels else 0
            firsts, seconds = self._tokenize_sides(texts, choices)
            choice_columns = task.choices if len(task.choices) > 1 else task.choices * len(choices)
            for column, tokens in zip((task.text, *choice_columns), (firsts[0], *seconds), strict=True):
                require_tokens(place, column, tokens)
            room = length // len(choices) - frame.n_special(pair=True)
            if room < 2:
                raise UsageError(
                    f"{place}: data.sequence_length = {length} has no room for {len(choices)} choices, which share a "
                    "row: choose more"
                )
            longest = max(len(first) + len(second) for first, second in zip(firsts, seconds, strict=True))
            if longest > room:
                needed = (longest + frame.n_special(pair=True)) * len(choices)
                if task.too_long == "error":
                    raise UsageError(
                        f"{place}: has {len(choices)} choices, which share a row, of up to {longest} tokens, and needs "
                        f"{needed} of data.sequence_length = {length}: choose {needed} or more, or task.too_long = "
                        "'truncate'"
                    )
                n_cut += 1
            framed = [
                frame.wrap(*truncate_longest(first, second, room))
                for first, second in zip(firsts, seconds, strict=True)
            ]
            n_bytes = len("".join([*texts * len(choices), *choices]).encode())
            examples.append(join_sequences(framed, self.example_format.cls_index, label, n_bytes))
        note = f"{self.path}: {n_cut} of {len(rows)} examples are cut to {length} tokens for all choices"
        return examples, [note] if n_cut else []

    def _tokenize_sides(
        self, texts: Sequence[str], choices: Sequence[str]
    ) -> tuple[list[NDArray[np.integer]], list[NDArray[np.integer]]]:
        """Return the tokens of the first and of the second text of each choice."""
        text, *question = texts
        if self.example_format.is_causal:
            first, seconds = " ".join([text, *question]), list(choices)
        else:
            first, seconds = text, [" ".join([*question, choice]) for choice in choices]
        tokens = self.tokenizer.encode_batch([first, *seconds], THREADS)
        return [tokens[0]] * len(choices), [*tokens[1:]]

    def _read_choices(self, place: str, row: Row) -> list[str]:
        columns = self.task.choices
        if len(columns) > 1:
            return [read_row_text(place, row, column) for column in columns]
        value = row.get(columns[0])
        if isinstance(value, Mapping):  # ARC: {"text": [...], "label": [...]}
            value = value.get("text")
        if not isinstance(value, list) or len(value) < 2:
            raise UsageError(f"{place}: column {columns[0]!r} is {value!r:.40}: give a list of two or more choices")
        return [read_row_text(place, {columns[0]: choice}, columns[0]) for choice in value]

    def _read_label(self, place: str, row: Row, n_choices: int) -> int:
        value = row.get(self.task.label, "")
        if self.task.labels:
            choice = find_class_index(place, value, self.task.labels)
        else:
            text = format_label(value)
            if not text.isdecimal():
                raise UsageError(
                    f"{place}: label {text!r} is no number of a choice, from 0: name the choices in task.labels"
                )
            choice = int(text)
        if choice >= n_choices:
            raise UsageError(f"{place}: label {format_label(value)!r} is none of its {n_choices} choices: mend the row")
        return choice
