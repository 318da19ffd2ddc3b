"""Forms of tasks: how the columns of a row become tokens and an annotation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.files import Row, require_columns
from megatfm.tasks.frames import Frame, frame_of, truncate_longest
from megatfm.tokenizers import Tokenizer

THREADS = 4
MAX_SHOWN = 20
"""Labels that an error lists."""


@dataclass(frozen=True)
class EncodedExample:
    """One example: framed tokens, the bytes of its texts, and what the objective reads beside them."""

    tokens: NDArray[np.int64]
    text_bytes: int
    annotation: dict[str, Any]


def label_text(value: Any) -> str:
    """Return a label as the config lists it: a number or truth value of a typed file by its JSON word."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def labels_of(task: TaskConfig, rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows, sorted: whole numbers by their value, others by their text."""
    names = {label_text(row[task.label]) for row in rows if row[task.label] is not None} - {""}
    if not names:
        raise UsageError(
            f"{task.train}: column {task.label!r} is empty: name the column of the labels in task.label"
        )
    return sorted(
        names, key=lambda name: (0, int(name), name) if name.lstrip("-").isdigit() else (1, 0, name)
    )


def encode_rows(
    path: str,
    rows: Sequence[Row],
    task: TaskConfig,
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    with_labels: bool,
) -> tuple[list[EncodedExample], list[str]]:
    """Encode all rows of a file; returns the examples and what to say of them. Raises UsageError that names the row."""
    columns = {"task.text": task.text} | ({"task.text_pair": task.text_pair} if task.text_pair else {})
    if with_labels:
        columns["task.label"] = task.label
    require_columns(path, rows, columns)
    firsts = [_text(path, number, row, task.text) for number, row in enumerate(rows, start=1)]
    encoded = tokenizer.encode_batch(firsts, THREADS)
    seconds: list[str] = []
    encoded_pairs: Sequence[NDArray[np.int32] | None] = [None] * len(rows)
    if task.text_pair:
        seconds = [_text(path, number, row, task.text_pair) for number, row in enumerate(rows, start=1)]
        encoded_pairs = tokenizer.encode_batch(seconds, THREADS)
    classes = {name: number for number, name in enumerate(task.labels)}
    frame = frame_of(tokenizer)
    examples, n_cut = [], 0
    for number, (row, first, second) in enumerate(zip(rows, encoded, encoded_pairs, strict=True), start=1):
        label = _class_of(path, number, row, task, classes) if with_labels else 0
        room = sequence_length - frame.n_special(pair=second is not None)
        length = len(first) + (0 if second is None else len(second))
        if length > room:
            _refuse_long(path, number, task, length, room, sequence_length, frame)
            n_cut += 1
        framed = frame.wrap(*truncate_longest(first, second, room))
        annotation: dict[str, Any] = {"label": label}
        if framed.second is not None:
            annotation["second"] = framed.second
        texts = firsts[number - 1] + (seconds[number - 1] if seconds else "")
        examples.append(EncodedExample(framed.tokens, len(texts.encode()), annotation))
    notes = [f"{path}: {n_cut} of {len(rows)} examples cut to {sequence_length} tokens"] if n_cut else []
    return examples, notes


def _text(path: str, number: int, row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if value in (None, "") or isinstance(value, str) else f"{value!r:.40}, not text"
        raise UsageError(
            f"{path}, row {number}: column {column!r} is {shown}: give a text, or take the row out"
        )
    return value


def _class_of(path: str, number: int, row: Row, task: TaskConfig, classes: dict[str, int]) -> int:
    name = label_text(row.get(task.label, ""))
    if name not in classes:
        known = ", ".join(list(classes)[:MAX_SHOWN]) + (", …" if len(classes) > MAX_SHOWN else "")
        raise UsageError(
            f"{path}, row {number}: label {name!r} is none of the task's{did_you_mean(name, list(classes))}; there "
            f"are: {known}: mend the row, or list it in task.labels"
        )
    return classes[name]


def _refuse_long(
    path: str, number: int, task: TaskConfig, length: int, room: int, sequence_length: int, frame: Frame
) -> None:
    if room < 1:
        raise UsageError(
            f"data.sequence_length = {sequence_length}: leaves no room for text beside the special tokens: choose more"
        )
    if task.too_long == "error":
        needed = length + sequence_length - room
        raise UsageError(
            f"{path}, row {number}: has {needed} tokens, more than data.sequence_length = {sequence_length}: choose "
            f"{needed} or more, or task.too_long = 'truncate'"
        )


def iter_texts(rows: Sequence[Row], task: TaskConfig) -> Iterator[str]:
    """Iterate over the texts of rows, for reports."""
    for row in rows:
        yield " ".join(str(row[column]) for column in (task.text, task.text_pair) if column)
