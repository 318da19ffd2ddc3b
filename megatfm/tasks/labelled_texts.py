"""Texts, pairs of texts, tagged words and choices with labels, as tokens with the labels' positions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.examples import (
    THREADS,
    EncodedExample,
    ExampleFormat,
    Frame,
    Tokens,
    build_frame,
    join_sequences,
    make_example,
    require_tokens,
    truncate_longest,
)
from megatfm.tasks.files import (
    LABEL_SEPARATOR,
    Row,
    find_class_index,
    format_label,
    locate_rows,
    read_row_text,
    require_columns,
)
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class LabelledTextEncoder:
    """Encodes the rows of one file. with_labels: false for files whose labels are to be predicted."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    with_labels: bool

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples and notes for the log. Raises UsageError that names the row."""
        task = self.task
        columns = {"task.text": task.text} | ({"task.text_pair": task.text_pair} if task.text_pair else {})
        if self.with_labels:
            columns["task.label"] = task.label
        require_columns(self.path, rows, columns)
        encode = self._encode_words if task.form == "tagging" else self._encode_texts
        frame = build_frame(self.tokenizer, self.example_format)
        examples, n_cut = encode(rows, frame)
        cut = f"{self.path}: {n_cut} of {len(rows)} examples are cut to {self.example_format.sequence_length} tokens"
        return examples, [cut] if n_cut else []

    def _encode_texts(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts or pairs, each with one label or list of labels."""
        task, cls_index = self.task, self.example_format.cls_index
        first_texts, first_tokens = self._tokenize_column(rows, task.text)
        second_texts: Sequence[str] = [""] * len(rows)
        second_tokens: Sequence[Tokens | None] = [None] * len(rows)
        if task.text_pair:
            second_texts, second_tokens = self._tokenize_column(rows, task.text_pair)
        read_label, examples, n_cut = LABEL_READERS[task.form], [], 0
        columns = zip(rows, first_texts, first_tokens, second_texts, second_tokens, strict=True)
        for place, (row, first_text, first, second_text, second) in locate_rows(self.path, columns):
            label = read_label(self, place, row) if self.with_labels else self._make_placeholder_label()
            room = self.example_format.sequence_length // (1 + task.both_orders)
            room -= frame.n_special(pair=second is not None)
            n_cut += self._check_length(place, len(first) + (0 if second is None else len(second)), room)
            first, second = truncate_longest(first, second, room)
            framed = frame.wrap(first, second)
            n_bytes = len((first_text + second_text).encode())
            if task.both_orders and second is not None:
                both_orders = [framed, frame.wrap(second, first)]
                examples.append(join_sequences(both_orders, cls_index, label, 2 * n_bytes))
            else:
                examples.append(make_example(framed, n_bytes, [cls_index % len(framed.tokens)], [label]))
        return examples, n_cut

    def _tokenize_column(self, rows: Sequence[Row], column: str) -> tuple[list[str], Sequence[Tokens]]:
        """Return a column's texts and their tokens. Raises UsageError for a row that has none."""
        texts = [read_row_text(place, row, column) for place, row in locate_rows(self.path, rows)]
        tokens_of_texts = self.tokenizer.encode_batch(texts, THREADS)
        for place, tokens in locate_rows(self.path, tokens_of_texts):
            require_tokens(place, column, tokens)
        return texts, tokens_of_texts

    def _encode_words(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts of words; the first sub-word of each carries its tag."""
        task, examples, n_cut = self.task, [], 0
        prefix = " " if self.tokenizer.kind == "byte-bpe" else ""
        for place, row in locate_rows(self.path, rows):
            words = self._read_list(place, row, task.text, None)
            spaced_words = [word if not index else f"{prefix}{word}" for index, word in enumerate(words)]
            word_tokens = self.tokenizer.encode_batch(spaced_words, THREADS)
            for index, tokens_of_word in enumerate(word_tokens):
                if not len(tokens_of_word):
                    raise UsageError(f"{place}: word {index + 1}, {words[index]!r}, makes no token: take it out")
            tags = self._read_list(place, row, task.label, None) if self.with_labels else []
            if self.with_labels and len(tags) != len(words):
                raise UsageError(f"{place}: has {len(words)} words and {len(tags)} tags: give each word a tag")
            labels = [self.find_class(place, tag) for tag in tags] or [0] * len(words)
            starts = np.cumsum([0, *map(len, word_tokens[:-1])])
            tokens = np.concatenate(word_tokens)
            room = self.example_format.sequence_length - frame.n_special(pair=False)
            n_cut += self._check_length(place, len(tokens), room)
            n_kept = int((starts < room).sum())
            positions = (starts[:n_kept] + len(frame.before)).tolist()
            text_bytes = len(" ".join(words).encode())
            examples.append(make_example(frame.wrap(tokens[:room]), text_bytes, positions, labels[:n_kept]))
        return examples, n_cut

    def find_class(self, place: str, label: Any) -> int:
        """Return the class of a label. Raises UsageError for an unlisted one."""
        return find_class_index(place, label, self.task.labels)

    def read_class(self, place: str, row: Row) -> int:
        """Return the class of a row's only label."""
        return self.find_class(place, row.get(self.task.label, ""))

    def read_flags(self, place: str, row: Row) -> list[int]:
        """Return a row's classes as flags [C]: 1 for a class that it has, else 0."""
        names = self._read_list(place, row, self.task.label, LABEL_SEPARATOR, may_be_empty=True)
        classes = {self.find_class(place, name) for name in names}
        return [int(index in classes) for index in range(len(self.task.labels))]

    def read_number(self, place: str, row: Row) -> list[float]:
        """Return a row's label as a number."""
        value = row.get(self.task.label)
        try:
            parsed = float(value) if value is not None and not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            parsed = math.nan
        if not math.isfinite(parsed):
            raise UsageError(f"{place}: column {self.task.label!r} is {value!r:.40}: give a number")
        return [parsed]

    def _make_placeholder_label(self) -> Any:
        classes = max(1, len(self.task.labels))
        return 0 if self.task.form == "classification" else [0] * classes

    def _read_list(
        self, place: str, row: Row, column: str, separator: str | None, *, may_be_empty: bool = False
    ) -> list[str]:
        """Return a column's list of texts. A single text is split at the separator; None: at white space."""
        value = row.get(column)
        if isinstance(value, str):
            value = [part for part in map(str.strip, value.split(separator)) if part]
        value = [] if value is None and may_be_empty else value
        if not isinstance(value, list) or not (value or may_be_empty):
            description = "empty" if value in (None, []) else f"{value!r:.40}, no list"
            raise UsageError(f"{place}: column {column!r} is {description}: give a list of texts, or take the row out")
        return [format_label(item) for item in value]

    def _check_length(self, place: str, n_tokens: int, room: int) -> bool:
        """Return whether an example must be cut to `room` tokens. Raises UsageError where the task forbids it."""
        length = self.example_format.sequence_length
        if room < 1:
            raise UsageError(
                f"data.sequence_length = {length}: leaves no room for text beside the special tokens: choose more"
            )
        if n_tokens > room and self.task.too_long == "error":
            n_orders = 1 + self.task.both_orders
            needed = n_orders * (n_tokens + length // n_orders - room)
            raise UsageError(
                f"{place}: has {needed} tokens, more than data.sequence_length = {length}: choose {needed} or more, or "
                "task.too_long = 'truncate'"
            )
        return n_tokens > room


LABEL_READERS: Mapping[str, Callable[[LabelledTextEncoder, str, Row], Any]] = {
    "classification": LabelledTextEncoder.read_class,
    "multilabel": LabelledTextEncoder.read_flags,
    "regression": LabelledTextEncoder.read_number,
}


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
            if task.labels and len(choices) > len(task.labels):
                raise UsageError(
                    f"{place}: has {len(choices)} choices, and task.labels names {len(task.labels)}: name all of them"
                )
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
