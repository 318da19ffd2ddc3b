"""Span extraction: questions and texts become windows, with answers located in the text by their characters."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.examples import EncodedExample, ExampleFormat, Frame, build_frame, require_tokens
from megatfm.tasks.files import Row, locate_rows, read_row_text, require_columns
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer

ID = "id"
"""Column that names a question, where there is one."""
SHOWN = 60
"""Number of an answer's characters that an error shows."""


@dataclass(frozen=True)
class Answer:
    """An answer and its span of characters [begin, end) in the text."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class SpanEncoder:
    """Encodes the rows of one file. A question whose text is too long gets several overlapping windows."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    with_labels: bool

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return windows in the order of the rows, and notes for the log. Raises UsageError that names the row."""
        task, tokenizer = self.task, self.tokenizer
        assert task.text_pair is not None
        columns = {"task.text": task.text, "task.text_pair": task.text_pair}
        require_columns(self.path, rows, columns | ({"task.label": task.label} if self.with_labels else {}))
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "task.form = 'span_extraction' needs a tokenizer.json, whose tokens have offsets into the text: "
                "start from a model with one (in `megatfm prep`, tokenizer.kind=wordpiece or byte-bpe)"
            )
        frame = build_frame(tokenizer, self.example_format)
        examples, counts = list[EncodedExample](), dict[str, int]()
        encoded: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        row_by_id: dict[str, int] = {}
        for number, (place, row) in enumerate(locate_rows(self.path, rows)):
            question, context = (read_row_text(place, row, column) for column in columns.values())
            if context not in encoded:  # the questions on a text follow one another: one entry is enough
                encoded = {context: tokenizer.encode_text_with_offsets(context)}
            question_tokens = tokenizer.encode(question).astype(np.int64)
            require_tokens(place, task.text, question_tokens)
            require_tokens(place, task.text_pair, encoded[context][0])
            answers = self._read_answers(place, row, context, counts) if self.with_labels else []
            name = str(number + 1 if row.get(ID) is None else row[ID])
            if row_by_id.setdefault(name, number) != number:
                raise UsageError(
                    f"{place}: has {ID} {name!r}, as row {row_by_id[name] + 1} has: give each question its own"
                )
            question_tokens = self._cut_question(place, question_tokens, counts)
            answer_texts = [answer.text for answer in answers]
            question_fields = {"id": name, "context": context, "answers": answer_texts, "row": number}
            examples += self._make_windows(place, question_tokens, *encoded[context], answers, question_fields, frame)
        return examples, self._write_notes(len(rows), len(examples), counts)

    def _cut_question(
        self, place: str, question_tokens: NDArray[np.int64], counts: dict[str, int]
    ) -> NDArray[np.int64]:
        limit = self.task.max_question_tokens
        if len(question_tokens) > limit:
            if self.task.too_long == "error":
                raise UsageError(
                    f"{place}: its question has {len(question_tokens)} tokens, more than task.max_question_tokens = "
                    f"{limit}: choose {len(question_tokens)} or more, or task.too_long = 'truncate'"
                )
            counts["cut"] = counts.get("cut", 0) + 1
        return question_tokens[:limit]

    def _make_windows(
        self,
        place: str,
        question_tokens: NDArray[np.int64],
        tokens: NDArray[np.int64],
        offsets: NDArray[np.int64],
        answers: Sequence[Answer],
        question_fields: Mapping[str, Any],
        frame: Frame,
    ) -> list[EncodedExample]:
        length = self.example_format.sequence_length
        room = length - frame.n_special(pair=True) - len(question_tokens)
        if room < 1:
            raise UsageError(
                f"{place}: data.sequence_length = {length} has no room for text beside the question's "
                f"{len(question_tokens)} tokens and the special ones: choose more"
            )
        span = self._find_token_span(place, offsets, answers[0]) if answers else None
        windows, begin = [], 0
        while True:
            end = min(begin + room, len(tokens))
            framed = frame.wrap(question_tokens, tokens[begin:end])
            first = len(frame.before) + len(question_tokens) + len(frame.between)
            label = [0, 0]
            if span is not None and begin <= span[0] and span[1] < end:
                label = [first + span[0] - begin, first + span[1] - begin]
            annotation = {
                "at": [0], "labels": [label], "second": framed.second, "row": question_fields["row"], "first": first,
                "offsets": offsets[begin:end].tolist(), "window": [begin, len(tokens)],
                **({} if begin else question_fields),
            }  # fmt: skip
            text_bytes = len(question_fields["context"][offsets[begin, 0] : offsets[end - 1, 1]].encode())
            windows.append(EncodedExample(framed.tokens, text_bytes, annotation))
            if end == len(tokens):
                return windows
            begin += min(room, self.task.stride)

    def _find_token_span(self, place: str, offsets: NDArray[np.int64], answer: Answer) -> tuple[int, int]:
        """Return the first and the last token that overlap an answer."""
        inside = (offsets[:, 1] > answer.begin) & (offsets[:, 0] < answer.end)
        if not inside.any():
            raise UsageError(f"{place}: answer {answer.text:.{SHOWN}} lies in no token of the text: mend the row")
        indices = np.flatnonzero(inside)
        return int(indices[0]), int(indices[-1])

    def _read_answers(self, place: str, row: Row, context: str, counts: dict[str, int]) -> list[Answer]:
        answers = []
        for text, start in self._list_answers(place, row):
            answer, is_moved = find_answer(context, text, start)
            if answer is None:
                raise UsageError(
                    f"{place}: answer {text[:SHOWN]!r} is not in column {self.task.text_pair!r}: mend the row, or take "
                    "it out"
                )
            counts["moved"] = counts.get("moved", 0) + is_moved
            answers.append(answer)
        if not answers and not self.task.no_answer:
            raise UsageError(
                f"{place}: column {self.task.label!r} has no answer: take it out, or set task.no_answer=true where "
                "questions may have none"
            )
        return answers

    def _list_answers(self, place: str, row: Row) -> list[tuple[str, int]]:
        """Return text and first character of each answer, from SQuAD's format or that of the datasets library."""
        value = row.get(self.task.label)
        if row.get("is_impossible") is True:
            return []
        if isinstance(value, Mapping):
            texts, starts = value.get("text"), value.get("answer_start")
            if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
                raise UsageError(
                    f"{place}: column {self.task.label!r} lacks the lists 'text' and 'answer_start' of one length"
                )
            value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        if not isinstance(value, list):
            raise UsageError(
                f"{place}: column {self.task.label!r} is {value!r:.40}: give objects with text and answer_start, as "
                "SQuAD's files have"
            )
        listed = []
        for answer in value:
            text, start = (
                (answer.get(key) for key in ("text", "answer_start")) if isinstance(answer, Mapping) else (0, 0)
            )
            if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
                raise UsageError(f"{place}: answer {answer!r:.60} lacks a text or its answer_start, a number from 0")
            listed.append((text, start))
        return listed

    def _write_notes(self, n_rows: int, n_windows: int, counts: Mapping[str, int]) -> list[str]:
        notes = [f"{self.path}: {n_rows:,} questions are read in {n_windows:,} windows"]
        if counts.get("cut"):
            notes.append(f"{self.path}: {counts['cut']} questions are cut to {self.task.max_question_tokens} tokens")
        if counts.get("moved"):
            notes.append(
                f"{self.path}: {counts['moved']} answers stand elsewhere than answer_start, or are spelled otherwise: "
                "the nearest place of their text was taken"
            )
        return notes


def find_answer(context: str, text: str, start: int) -> tuple[Answer | None, bool]:
    """Return an answer's span in `context`, and whether it differs from the stated `start` or spelling.

    Tried in turn: the stated start; the nearest occurrence of the same characters; the nearest one under NFKC with
    white space folded. Returns None if there is no occurrence.
    """
    stripped = text.strip()
    begin = start + len(text) - len(text.lstrip())
    if context[begin : begin + len(stripped)] == stripped:
        return Answer(text, begin, begin + len(stripped)), False
    spans = _find_occurrences(context, stripped)
    if not spans:
        folded_context, source_spans = _fold(context)
        occurrences = _find_occurrences(folded_context, _fold(stripped)[0])
        spans = [(source_spans[begin][0], source_spans[end - 1][1]) for begin, end in occurrences]
    if not spans:
        return None, True
    first, last = min(spans, key=lambda span: abs(span[0] - start))
    return Answer(text, first, last), True


def _find_occurrences(text: str, part: str) -> list[tuple[int, int]]:
    spans, begin = [], text.find(part) if part else -1
    while begin >= 0:
        spans.append((begin, begin + len(part)))
        begin = text.find(part, begin + 1)
    return spans


def _fold(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text in NFKC with single spaces, and the span in the original of each of its characters."""
    characters, source_spans = list[str](), list[tuple[int, int]]()
    begin = 0
    while begin < len(text):
        end = begin + 1
        while end < len(text) and unicodedata.combining(text[end]):  # keep a letter with its combining marks
            end += 1
        for character in unicodedata.normalize("NFKC", text[begin:end]):
            if not character.isspace():
                characters.append(character)
                source_spans.append((begin, end))
            elif characters and characters[-1] != " ":
                characters.append(" ")
                source_spans.append((begin, end))
        begin = end
    return "".join(characters).rstrip(), source_spans
