"""Forms of tasks: how the columns of a row become tokens and an annotation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.files import Row, require_columns
from megatfm.tasks.frames import Frame, Framed, frame_of, truncate_longest
from megatfm.tokenizers import Tokenizer

THREADS = 4
"""Threads that tokenize."""
MAX_SHOWN = 20
"""Labels that an error lists."""
LABEL_SEPARATOR = ";"
Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class EncodedExample:
    """One example: framed tokens, the bytes of its texts, and what the objective reads beside them: the tokens that
    carry labels (`at`), the labels, and where the second text begins (`second`).

    sizes: of an encoder-decoder's example, the tokens of the encoder and of the decoder, which make `tokens` together.
    """

    tokens: NDArray[np.int64]
    text_bytes: int
    annotation: dict[str, Any]
    sizes: tuple[int, int] | None = None


@dataclass(frozen=True)
class RowEncoder:
    """Encodes the rows of one file. carrier: the token that carries an example's label, 0 or −1."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    length: int
    with_labels: bool
    carrier: int

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples, and what to say of them. Raises UsageError that names the row."""
        task = self.task
        columns = {"task.text": task.text} | ({"task.text_pair": task.text_pair} if task.text_pair else {})
        if self.with_labels:
            columns["task.label"] = task.label
        require_columns(self.path, rows, columns)
        encode = self._encode_words if task.form == "tagging" else self._encode_texts
        examples, n_cut = encode(rows, frame_of(self.tokenizer, is_causal=self.carrier == -1))
        cut = f"{self.path}: {n_cut} of {len(rows)} examples cut to {self.length} tokens"
        return examples, [cut] if n_cut else []

    def _encode_texts(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts or pairs, each with one label or list of labels."""
        task, n_cut = self.task, 0
        firsts = [self._text(number, row, task.text) for number, row in enumerate(rows, start=1)]
        encoded: list[Tokens] = [*self.tokenizer.encode_batch(firsts, THREADS)]
        seconds: list[str] = []
        pairs: list[Tokens | None] = [None] * len(rows)
        if task.text_pair:
            seconds = [self._text(number, row, task.text_pair) for number, row in enumerate(rows, start=1)]
            pairs = [*self.tokenizer.encode_batch(seconds, THREADS)]
        read_label = LABEL_READERS[task.form]
        examples = []
        for number, (row, first, second) in enumerate(zip(rows, encoded, pairs, strict=True), start=1):
            label = read_label(self, number, row) if self.with_labels else self._no_label()
            room = self.length // (1 + task.both_orders) - frame.n_special(pair=second is not None)
            n_tokens = len(first) + (0 if second is None else len(second))
            n_cut += self._check_length(number, n_tokens, room)
            first, second = truncate_longest(first, second, room)
            framed = frame.wrap(first, second)
            n_bytes = len((firsts[number - 1] + (seconds[number - 1] if seconds else "")).encode())
            at = [self.carrier % len(framed.tokens)]
            example = _example(framed, n_bytes, at, [label])
            if task.both_orders and second is not None:
                example = join_parts([framed, frame.wrap(second, first)], self.carrier, label, 2 * n_bytes)
            examples.append(example)
        return examples, n_cut

    def _encode_words(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts of words; the first sub-word of each carries its tag."""
        task, examples, n_cut = self.task, [], 0
        prefix = " " if self.tokenizer.kind == "byte-bpe" else ""
        for number, row in enumerate(rows, start=1):
            words = self._list(number, row, task.text, None)
            spelled = [word if not place else f"{prefix}{word}" for place, word in enumerate(words)]
            pieces = self.tokenizer.encode_batch(spelled, THREADS)
            for place, piece in enumerate(pieces):
                if not len(piece):
                    self._refuse(number, f"word {place + 1}, {words[place]!r}, makes no token: take it out")
            tags = self._list(number, row, task.label, None) if self.with_labels else []
            if self.with_labels and len(tags) != len(words):
                self._refuse(number, f"has {len(words)} words and {len(tags)} tags: give each word a tag")
            labels = [self.class_of(number, tag) for tag in tags] or [0] * len(words)
            starts = np.cumsum([0, *map(len, pieces[:-1])])
            tokens, room = np.concatenate(pieces), self.length - frame.n_special(pair=False)
            n_cut += self._check_length(number, len(tokens), room)
            n_kept = int((starts < room).sum())
            at = (starts[:n_kept] + len(frame.before)).tolist()
            text_bytes = len(" ".join(words).encode())
            examples.append(_example(frame.wrap(tokens[:room]), text_bytes, at, labels[:n_kept]))
        return examples, n_cut

    def class_of(self, number: int, label: Any) -> int:
        """Return the class of a label. Raises UsageError for one that is not listed."""
        return class_of(self.path, number, label, self.task.labels)

    def single_class(self, number: int, row: Row) -> int:
        """Return the class of a row's one label."""
        return self.class_of(number, row.get(self.task.label, ""))

    def class_flags(self, number: int, row: Row) -> list[int]:
        """Return 1 for each class that a row has, and 0 for the others."""
        names = self._list(number, row, self.task.label, LABEL_SEPARATOR, may_be_empty=True)
        classes = {self.class_of(number, name) for name in names}
        return [int(number in classes) for number in range(len(self.task.labels))]

    def number(self, number: int, row: Row) -> list[float]:
        """Return a row's label as a number."""
        value = row.get(self.task.label)
        try:
            parsed = float(value) if value is not None and not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            parsed = math.nan
        if not math.isfinite(parsed):
            self._refuse(number, f"column {self.task.label!r} is {value!r:.40}: give a number")
        return [parsed]

    def _no_label(self) -> Any:
        classes = max(1, len(self.task.labels))
        return 0 if self.task.form == "classification" else [0] * classes

    def _text(self, number: int, row: Row, column: str) -> str:
        return row_text(self.path, number, row, column)

    def _list(
        self, number: int, row: Row, column: str, separator: str | None, *, may_be_empty: bool = False
    ) -> list[str]:
        """Return a column's list of texts; a text is cut at the separator, None: at white space."""
        value = row.get(column)
        if isinstance(value, str):
            value = [part for part in map(str.strip, value.split(separator)) if part]
        value = [] if value is None and may_be_empty else value
        if not isinstance(value, list) or not (value or may_be_empty):
            shown = "empty" if value in (None, []) else f"{value!r:.40}, no list"
            self._refuse(number, f"column {column!r} is {shown}: give a list of texts, or take the row out")
        return [label_text(item) for item in value or ()]

    def _check_length(self, number: int, n_tokens: int, room: int) -> bool:
        """Return whether tokens have to be cut. Raises UsageError where that is not wanted."""
        if room < 1:
            raise UsageError(
                f"data.sequence_length = {self.length}: leaves no room for text beside the special tokens: choose more"
            )
        if n_tokens > room and self.task.too_long == "error":
            parts = 1 + self.task.both_orders
            needed = parts * (n_tokens + self.length // parts - room)
            self._refuse(
                number,
                f"has {needed} tokens, more than data.sequence_length = {self.length}: choose {needed} or more, or "
                "task.too_long = 'truncate'",
            )
        return n_tokens > room

    def _refuse(self, number: int, reason: str) -> None:
        raise UsageError(f"{self.path}, row {number}: {reason}")


LABEL_READERS: Mapping[str, Callable[[RowEncoder, int, Row], Any]] = {
    "classification": RowEncoder.single_class,
    "multilabel": RowEncoder.class_flags,
    "regression": RowEncoder.number,
}


def class_of(path: str, number: int, label: Any, labels: Sequence[str]) -> int:
    """Return the class of a row's label. Raises UsageError for one that is not listed."""
    name = label_text(label)
    if name not in labels:
        known = ", ".join(labels[:MAX_SHOWN]) + (", …" if len(labels) > MAX_SHOWN else "")
        raise UsageError(
            f"{path}, row {number}: label {name!r} is none of the task's{did_you_mean(name, labels)}; there are: "
            f"{known}: mend the row, or list it in task.labels"
        )
    return labels.index(name)


def row_text(path: str, number: int, row: Row, column: str) -> str:
    """Return the text of a row's column. Raises UsageError for an empty one, or what is no text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if value is None or isinstance(value, str) else f"{value!r:.40}, not text"
        raise UsageError(
            f"{path}, row {number}: column {column!r} is {shown}: give a text, or take the row out"
        )
    return value


def join_parts(frames: Sequence[Framed], carrier: int, label: Any, text_bytes: int) -> EncodedExample:
    """Return an example of several framed texts, one after another, each of which has a token that carries a score."""
    lengths = [len(framed.tokens) for framed in frames]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    annotation = {
        "at": [start + carrier % n for start, n in zip(starts, lengths, strict=True)],
        "labels": [label],
        "starts": starts,
        "second": [
            start + (n if framed.second is None else framed.second)
            for framed, start, n in zip(frames, starts, lengths, strict=True)
        ],
    }
    return EncodedExample(np.concatenate([framed.tokens for framed in frames]), text_bytes, annotation)


def _example(framed: Framed, text_bytes: int, at: list[int], labels: list[Any]) -> EncodedExample:
    second = {} if framed.second is None else {"second": framed.second}
    return EncodedExample(framed.tokens, text_bytes, {"at": at, "labels": labels, **second})


def label_text(value: Any) -> str:
    """Return a label as the config lists it: a number or truth value of a typed file by its JSON word."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def labels_of(task: TaskConfig, rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows, sorted: whole numbers by their value, others by their text."""
    separator = LABEL_SEPARATOR if task.form == "multilabel" else None
    names: set[str] = set()
    for row in rows:
        value = row[task.label]
        if task.form != "classification" and isinstance(value, str):
            value = value.split(separator)
        names |= {
            label_text(item) for item in (value if isinstance(value, list) else [value]) if item is not None
        }
    names -= {""}
    if not names:
        raise UsageError(
            f"{task.train}: column {task.label!r} is empty: name the column of the labels in task.label"
        )
    return sorted(
        names, key=lambda name: (0, int(name), name) if name.lstrip("-").isdigit() else (1, 0, name)
    )
