"""Forms of tasks: special tokens around texts, and how the columns of a row become tokens and an annotation."""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.files import Row, require_columns
from megatfm.tokenizers import Tokenizer

THREADS = 4
"""Threads that tokenize."""
MAX_SHOWN = 20
"""Number of labels that an error lists."""
LABEL_SEPARATOR = ";"
INTEGER = re.compile(r"-?\d{1,4000}")
"""Labels that are sorted as numbers; Python reads no longer ones."""
Tokens = NDArray[np.integer]


class Framed(NamedTuple):
    """Tokens [T] with special tokens, and the index of the second segment's first token; None: a single text."""

    tokens: NDArray[np.int64]
    second: int | None


@dataclass(frozen=True)
class Frame:
    """Special tokens before, between and after texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def n_special(self, *, pair: bool) -> int:
        """Return the number of special tokens of one text, or of a pair."""
        return len(self.before) + len(self.after) + (len(self.between) if pair else 0)

    def wrap(self, first: Tokens, second: Tokens | None = None) -> Framed:
        """Return the tokens of one text or of a pair, with special tokens."""
        if second is None:
            return Framed(np.concatenate([self.before, first, self.after]).astype(np.int64), None)
        head = np.concatenate([self.before, first, self.between]).astype(np.int64)
        return Framed(np.concatenate([head, second, self.after]).astype(np.int64), len(head))


def build_frame(tokenizer: Tokenizer, *, is_causal: bool = False, ends_in_cls: bool = False) -> Frame:
    """Return a tokenizer's frame: [CLS] a [SEP] b [SEP], or the one of its file's post-processor.

    is_causal: for a decoder, GPT-1's [START] a [DELIM] b [EXTRACT] as BOS; [SEP] or EOS; [CLS] or EOS. ends_in_cls: for
    XLNet, a [SEP] b [SEP] [CLS]. Raises UsageError if the tokenizer of another model has neither these tokens nor a
    post-processor.
    """
    if is_causal:
        between = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
        return Frame((tokenizer.bos,), (between,), (tokenizer.eos if tokenizer.cls is None else tokenizer.cls,))
    declared = getattr(tokenizer, "find_pair_template", lambda: None)()
    if declared is not None and not ends_in_cls:
        return Frame(*declared)
    if tokenizer.cls is None or tokenizer.sep is None:
        raise UsageError(
            "the tokenizer has no tokens such as [CLS] and [SEP] to put around a text: start from a model whose "
            "tokenizer has them"
        )
    if ends_in_cls:
        return Frame((), (tokenizer.sep,), (tokenizer.sep, tokenizer.cls))
    return Frame((tokenizer.cls,), (tokenizer.sep,), (tokenizer.sep,))


def truncate_longest(first: Tokens, second: Tokens | None, room: int) -> tuple[Tokens, Tokens | None]:
    """Cut the ends of texts to `room` tokens together, the longer one first (transformers' longest_first)."""
    if second is None:
        return first[:room], None
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    longer, shorter = max(len(first), len(second)), min(len(first), len(second))
    if longer - shorter >= excess:
        keep_longer, keep_shorter = longer - excess, shorter
    else:
        keep_shorter = room // 2
        keep_longer = room - keep_shorter
    if len(first) >= len(second):
        return first[:keep_longer], second[:keep_shorter]
    return first[:keep_shorter], second[:keep_longer]


@dataclass(frozen=True)
class EncodedExample:
    """One example: tokens [T] with special tokens, the UTF-8 bytes of its texts, and the objective's annotation.

    annotation: `at`, the indices of the tokens that carry labels; `labels`; `second`, the index where the second text
    begins. side_lengths: for an encoder-decoder, the tokens of encoder and decoder, which follow one another in
    `tokens`.
    """

    tokens: NDArray[np.int64]
    text_bytes: int
    annotation: dict[str, Any]
    side_lengths: tuple[int, int] | None = None


@dataclass(frozen=True)
class RowEncoder:
    """Encodes the rows of one file. cls_index: the token that carries an example's label, 0 or −1. ends_in_cls: for
    XLNet; another last token is a decoder's."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    length: int
    with_labels: bool
    cls_index: int
    ends_in_cls: bool = False

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples and notes for the log. Raises UsageError that names the row."""
        task = self.task
        columns = {"task.text": task.text} | ({"task.text_pair": task.text_pair} if task.text_pair else {})
        if self.with_labels:
            columns["task.label"] = task.label
        require_columns(self.path, rows, columns)
        encode = self._encode_words if task.form == "tagging" else self._encode_texts
        is_causal = self.cls_index == -1 and not self.ends_in_cls
        frame = build_frame(self.tokenizer, is_causal=is_causal, ends_in_cls=self.ends_in_cls)
        examples, n_cut = encode(rows, frame)
        cut = f"{self.path}: {n_cut} of {len(rows)} examples are cut to {self.length} tokens"
        return examples, [cut] if n_cut else []

    def _encode_texts(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts or pairs, each with one label or list of labels."""
        task, n_cut = self.task, 0
        firsts = [self._read_text(row_number, row, task.text) for row_number, row in enumerate(rows, start=1)]
        encoded_firsts: list[Tokens] = [*self.tokenizer.encode_batch(firsts, THREADS)]
        seconds: list[str] = []
        encoded_pairs: list[Tokens | None] = [None] * len(rows)
        if task.text_pair:
            seconds = [self._read_text(row_number, row, task.text_pair) for row_number, row in enumerate(rows, start=1)]
            encoded_pairs = [*self.tokenizer.encode_batch(seconds, THREADS)]
        read_label = LABEL_READERS[task.form]
        examples = []
        for row_number, (row, first, second) in enumerate(
            zip(rows, encoded_firsts, encoded_pairs, strict=True), start=1
        ):
            require_tokens(self.path, row_number, task.text, first)
            if second is not None:
                require_tokens(self.path, row_number, str(task.text_pair), second)
            label = read_label(self, row_number, row) if self.with_labels else self._make_placeholder_label()
            room = self.length // (1 + task.both_orders) - frame.n_special(pair=second is not None)
            n_tokens = len(first) + (0 if second is None else len(second))
            n_cut += self._check_length(row_number, n_tokens, room)
            first, second = truncate_longest(first, second, room)
            framed = frame.wrap(first, second)
            n_bytes = len((firsts[row_number - 1] + (seconds[row_number - 1] if seconds else "")).encode())
            positions = [self.cls_index % len(framed.tokens)]
            example = _make_example(framed, n_bytes, positions, [label])
            if task.both_orders and second is not None:
                example = join_sequences([framed, frame.wrap(second, first)], self.cls_index, label, 2 * n_bytes)
            examples.append(example)
        return examples, n_cut

    def _encode_words(self, rows: Sequence[Row], frame: Frame) -> tuple[list[EncodedExample], int]:
        """Encode texts of words; the first sub-word of each carries its tag."""
        task, examples, n_cut = self.task, [], 0
        prefix = " " if self.tokenizer.kind == "byte-bpe" else ""
        for row_number, row in enumerate(rows, start=1):
            words = self._list(row_number, row, task.text, None)
            spaced_words = [word if not index else f"{prefix}{word}" for index, word in enumerate(words)]
            word_tokens = self.tokenizer.encode_batch(spaced_words, THREADS)
            for index, tokens_of_word in enumerate(word_tokens):
                if not len(tokens_of_word):
                    self._refuse(row_number, f"word {index + 1}, {words[index]!r}, makes no token: take it out")
            tags = self._list(row_number, row, task.label, None) if self.with_labels else []
            if self.with_labels and len(tags) != len(words):
                self._refuse(row_number, f"has {len(words)} words and {len(tags)} tags: give each word a tag")
            labels = [self.class_index(row_number, tag) for tag in tags] or [0] * len(words)
            starts = np.cumsum([0, *map(len, word_tokens[:-1])])
            tokens, room = np.concatenate(word_tokens), self.length - frame.n_special(pair=False)
            n_cut += self._check_length(row_number, len(tokens), room)
            n_kept = int((starts < room).sum())
            positions = (starts[:n_kept] + len(frame.before)).tolist()
            text_bytes = len(" ".join(words).encode())
            examples.append(_make_example(frame.wrap(tokens[:room]), text_bytes, positions, labels[:n_kept]))
        return examples, n_cut

    def class_index(self, row_number: int, label: Any) -> int:
        """Return the class of a label. Raises UsageError for an unlisted one."""
        return class_index(self.path, row_number, label, self.task.labels)

    def read_class(self, row_number: int, row: Row) -> int:
        """Return the class of a row's only label."""
        return self.class_index(row_number, row.get(self.task.label, ""))

    def read_flags(self, row_number: int, row: Row) -> list[int]:
        """Return a row's classes as flags [C]: 1 for a class that it has, else 0."""
        names = self._list(row_number, row, self.task.label, LABEL_SEPARATOR, may_be_empty=True)
        classes = {self.class_index(row_number, name) for name in names}
        return [int(index in classes) for index in range(len(self.task.labels))]

    def read_number(self, row_number: int, row: Row) -> list[float]:
        """Return a row's label as a number."""
        value = row.get(self.task.label)
        try:
            parsed = float(value) if value is not None and not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            parsed = math.nan
        if not math.isfinite(parsed):
            self._refuse(row_number, f"column {self.task.label!r} is {value!r:.40}: give a number")
        return [parsed]

    def _make_placeholder_label(self) -> Any:
        classes = max(1, len(self.task.labels))
        return 0 if self.task.form == "classification" else [0] * classes

    def _read_text(self, row_number: int, row: Row, column: str) -> str:
        return row_text(self.path, row_number, row, column)

    def _list(
        self, row_number: int, row: Row, column: str, separator: str | None, *, may_be_empty: bool = False
    ) -> list[str]:
        """Return a column's list of texts. A single text is split at the separator; None: at white space."""
        value = row.get(column)
        if isinstance(value, str):
            value = [part for part in map(str.strip, value.split(separator)) if part]
        value = [] if value is None and may_be_empty else value
        if not isinstance(value, list) or not (value or may_be_empty):
            shown = "empty" if value in (None, []) else f"{value!r:.40}, no list"
            self._refuse(row_number, f"column {column!r} is {shown}: give a list of texts, or take the row out")
        return [label_text(item) for item in value or ()]

    def _check_length(self, row_number: int, n_tokens: int, room: int) -> bool:
        """Whether an example must be cut to `room` tokens. Raises UsageError where the task forbids it."""
        if room < 1:
            raise UsageError(
                f"data.sequence_length = {self.length}: leaves no room for text beside the special tokens: choose more"
            )
        if n_tokens > room and self.task.too_long == "error":
            n_orders = 1 + self.task.both_orders
            needed = n_orders * (n_tokens + self.length // n_orders - room)
            self._refuse(
                row_number,
                f"has {needed} tokens, more than data.sequence_length = {self.length}: choose {needed} or more, or "
                "task.too_long = 'truncate'",
            )
        return n_tokens > room

    def _refuse(self, row_number: int, reason: str) -> None:
        raise UsageError(f"{self.path}, row {row_number}: {reason}")


LABEL_READERS: Mapping[str, Callable[[RowEncoder, int, Row], Any]] = {
    "classification": RowEncoder.read_class,
    "multilabel": RowEncoder.read_flags,
    "regression": RowEncoder.read_number,
}


def class_index(path: str, row_number: int, label: Any, labels: Sequence[str]) -> int:
    """Return the class of a row's label. Raises UsageError for an unlisted one."""
    name = "" if label is None else label_text(label)
    if isinstance(label, list | Mapping):
        raise UsageError(
            f"{path}, row {row_number}: label {label!r:.60} is no single label: give one, or set task.form = "
            "'multilabel' for lists"
        )
    if not name and name not in labels:
        raise UsageError(f"{path}, row {row_number}: has no label: give one, or take the row out")
    if name not in labels:
        listed = ", ".join(labels[:MAX_SHOWN]) + (", …" if len(labels) > MAX_SHOWN else "")
        raise UsageError(
            f"{path}, row {row_number}: label {name!r} is none of the task's{did_you_mean(name, labels)}; there are: "
            f"{listed}: mend the row, or list it in task.labels"
        )
    return labels.index(name)


def row_text(path: str, row_number: int, row: Row, column: str) -> str:
    """Return the text of a row's column. Raises UsageError if it is empty or not a text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if value is None or isinstance(value, str) else f"{value!r:.40}, not text"
        raise UsageError(f"{path}, row {row_number}: column {column!r} is {shown}: give a text, or take the row out")
    return value


def require_tokens(path: str, row_number: int, column: str, tokens: Tokens) -> None:
    """Raise UsageError for a text of which the tokenizer leaves nothing, such as invisible characters."""
    if not len(tokens):
        raise UsageError(
            f"{path}, row {row_number}: column {column!r} makes no token: give a text, or take the row out"
        )


def join_sequences(sequences: Sequence[Framed], cls_index: int, label: Any, text_bytes: int) -> EncodedExample:
    """Return one example of several sequences in a row. Each sequence's `cls_index` token carries a score."""
    lengths = [len(framed.tokens) for framed in sequences]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    annotation = {
        "at": [start + cls_index % n for start, n in zip(starts, lengths, strict=True)],
        "labels": [label],
        "starts": starts,
        "second": [
            start + (n if framed.second is None else framed.second)
            for framed, start, n in zip(sequences, starts, lengths, strict=True)
        ],
    }
    return EncodedExample(np.concatenate([framed.tokens for framed in sequences]), text_bytes, annotation)


def _make_example(framed: Framed, text_bytes: int, positions: list[int], labels: list[Any]) -> EncodedExample:
    second = {} if framed.second is None else {"second": framed.second}
    return EncodedExample(framed.tokens, text_bytes, {"at": positions, "labels": labels, **second})


def label_text(value: Any) -> str:
    """Return a label as the config lists it. Booleans of typed files become `true` and `false`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def list_labels(task: TaskConfig, row: Row) -> list[str]:
    """Return the labels of a row, unchecked: one, or those of a list or of a text that is split."""
    value = row.get(task.label)
    if task.form != "classification" and isinstance(value, str):
        value = value.split(LABEL_SEPARATOR if task.form == "multilabel" else None)
    return [label_text(item) for item in (value if isinstance(value, list) else [value]) if item is not None]


def collect_labels(task: TaskConfig, rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows: integers first, by value, then the others by text. Raises UsageError for none,
    and for two spellings of one."""
    names = {name for row in rows for name in list_labels(task, row)} - {""}
    if not names:
        raise UsageError(f"{task.train}: column {task.label!r} is empty: name the column of the labels in task.label")
    if missing := sorted(name for name in names if name.lower() == "nan"):
        raise UsageError(
            f"{task.train}: column {task.label!r} has the label {missing[0]!r}, as missing values are written: mend "
            "its rows, or name all labels in task.labels if it is one"
        )
    spellings: dict[str, str] = {}
    for name in sorted(names):
        bare = unicodedata.normalize("NFC", name)
        number = bare.removesuffix(".0")
        if (earlier := spellings.setdefault(number if INTEGER.fullmatch(number) else bare, name)) != name:
            raise UsageError(
                f"{task.train}: column {task.label!r} has the labels {earlier!r} and {name!r}, two spellings of one: "
                "write it one way, or name all labels in task.labels"
            )
    return sorted(names, key=lambda name: (0, int(name), name) if INTEGER.fullmatch(name) else (1, 0, name))
