"""Span extraction: questions and texts become windows, and answers are found in texts by their characters."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.files import Row, require_columns
from megatfm.tasks.forms import EncodedExample, row_text
from megatfm.tasks.frames import Frame, frame_of
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer

ID = "id"
"""Column that names a question, where there is one."""
SHOWN = 60
"""Characters of an answer that an error shows."""


@dataclass(frozen=True)
class Answer:
    """An answer, and begin and end of its characters in the text."""

    text: str
    begin: int
    end: int


@dataclass(frozen=True)
class SpanEncoder:
    """Encodes the rows of one file: a window, or several that overlap, for each question."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    length: int
    with_labels: bool

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return windows in the order of the rows, and what to say of them. Raises UsageError that names the row."""
        task, tokenizer = self.task, self.tokenizer
        assert task.text_pair is not None
        columns = {"task.text": task.text, "task.text_pair": task.text_pair}
        require_columns(self.path, rows, columns | ({"task.label": task.label} if self.with_labels else {}))
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "task.form = 'span_extraction' needs a tokenizer.json, whose tokens tell their places in the text: "
                "start from a model with such a tokenizer"
            )
        frame, examples, counts = frame_of(tokenizer), list[EncodedExample](), dict[str, int]()
        encoded: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        seen: dict[str, int] = {}
        for number, row in enumerate(rows, start=1):
            question, context = (row_text(self.path, number, row, column) for column in columns.values())
            if context not in encoded:
                encoded = {
                    context: tokenizer.encode_text_with_offsets(context)
                }  # questions on a text stand together
            answers = self._answers(number, row, context, counts) if self.with_labels else []
            name = str(row.get(ID, number))
            if seen.setdefault(name, number) != number:
                self._refuse(
                    number, f"has {ID} {name!r}, as row {seen[name]} has: give each question its own"
                )
            asked = self._cut_question(number, tokenizer.encode(question).astype(np.int64), counts)
            facts = {"id": name, "context": context, "answers": [answer.text for answer in answers]}
            examples += self._windows(number, asked, *encoded[context], answers, facts, frame)
        return examples, self._notes(len(rows), len(examples), counts)

    def _cut_question(
        self, number: int, asked: NDArray[np.int64], counts: dict[str, int]
    ) -> NDArray[np.int64]:
        most = self.task.max_question_tokens
        if len(asked) > most:
            if self.task.too_long == "error":
                self._refuse(
                    number,
                    f"its question has {len(asked)} tokens, more than task.max_question_tokens = {most}: choose "
                    f"{len(asked)} or more, or task.too_long = 'truncate'",
                )
            counts["cut"] = counts.get("cut", 0) + 1
        return asked[:most]

    def _windows(
        self,
        number: int,
        asked: NDArray[np.int64],
        tokens: NDArray[np.int64],
        offsets: NDArray[np.int64],
        answers: Sequence[Answer],
        facts: Mapping[str, Any],
        frame: Frame,
    ) -> list[EncodedExample]:
        room = self.length - frame.n_special(pair=True) - len(asked)
        if room < 1 or not len(tokens):
            self._refuse(
                number,
                f"data.sequence_length = {self.length} has no room for text beside the question's "
                f"{len(asked)} tokens and the special ones: choose more"
                if len(tokens)
                else f"column {self.task.text_pair!r} makes no token: give a text, or take the row out",
            )
        span = self._token_span(number, offsets, answers[0]) if answers else None
        windows, begin = [], 0
        while True:
            end = min(begin + room, len(tokens))
            framed = frame.wrap(asked, tokens[begin:end])
            first = len(frame.before) + len(asked) + len(frame.between)
            label = [0, 0]
            if span is not None and begin <= span[0] and span[1] < end:
                label = [first + span[0] - begin, first + span[1] - begin]
            annotation = {
                "at": [0], "labels": [label], "second": framed.second, "row": number - 1, "first": first,
                "offsets": offsets[begin:end].tolist(), "window": [begin, len(tokens)],
                **({} if begin else facts),
            }  # fmt: skip
            text_bytes = len(facts["context"][offsets[begin, 0] : offsets[end - 1, 1]].encode())
            windows.append(EncodedExample(framed.tokens, text_bytes, annotation))
            if end == len(tokens):
                return windows
            begin += min(room, self.task.stride)

    def _token_span(self, number: int, offsets: NDArray[np.int64], answer: Answer) -> tuple[int, int]:
        """Return the first and the last token that an answer shares a character with."""
        inside = (offsets[:, 1] > answer.begin) & (offsets[:, 0] < answer.end)
        if not inside.any():
            self._refuse(number, f"answer {answer.text:.{SHOWN}} lies in no token of the text: mend the row")
        places = np.flatnonzero(inside)
        return int(places[0]), int(places[-1])

    def _answers(self, number: int, row: Row, context: str, counts: dict[str, int]) -> list[Answer]:
        answers = []
        for text, start in self._listed_answers(number, row):
            answer, is_moved = find_answer(context, text, start)
            if answer is None:
                self._refuse(
                    number,
                    f"answer {text[:SHOWN]!r} is not in column {self.task.text_pair!r}: mend the row, or take it out",
                )
            counts["moved"] = counts.get("moved", 0) + is_moved
            answers.append(answer)
        if not answers and not self.task.no_answer:
            self._refuse(
                number,
                f"column {self.task.label!r} has no answer: take it out, or set task.no_answer=true where "
                "questions may have none",
            )
        return answers

    def _listed_answers(self, number: int, row: Row) -> list[tuple[str, int]]:
        """Return texts and beginnings of answers, listed as SQuAD's files or the datasets library list them."""
        value = row.get(self.task.label)
        if row.get("is_impossible") is True:
            return []
        if isinstance(value, Mapping):
            texts, starts = value.get("text"), value.get("answer_start")
            if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
                self._refuse(
                    number,
                    f"column {self.task.label!r} lacks the lists 'text' and 'answer_start' of one length",
                )
            value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        if not isinstance(value, list):
            self._refuse(
                number,
                f"column {self.task.label!r} is {value!r:.40}: give objects with text and answer_start, as SQuAD's "
                "files have",
            )
        listed = []
        for answer in value:
            text, start = (
                (answer.get(key) for key in ("text", "answer_start"))
                if isinstance(answer, Mapping)
                else (0, 0)
            )
            if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
                self._refuse(
                    number, f"answer {answer!r:.60} lacks a text or its answer_start, a number from 0"
                )
            listed.append((text, start))
        return listed

    def _notes(self, n_rows: int, n_windows: int, counts: Mapping[str, int]) -> list[str]:
        notes = [f"{self.path}: {n_rows:,} questions in {n_windows:,} windows"]
        if counts.get("cut"):
            notes.append(
                f"{self.path}: {counts['cut']} questions cut to {self.task.max_question_tokens} tokens"
            )
        if counts.get("moved"):
            notes.append(
                f"{self.path}: {counts['moved']} answers stand elsewhere than answer_start, or are spelled otherwise: "
                "the nearest place of their text was taken"
            )
        return notes

    def _refuse(self, number: int, reason: str) -> NoReturn:
        raise UsageError(f"{self.path}, row {number}: {reason}")


def find_answer(context: str, text: str, start: int) -> tuple[Answer | None, bool]:
    """Return where an answer stands in a text, and whether it stands elsewhere, or otherwise spelled, than said.

    What is said is taken where it is true; else the nearest place with the same characters; else the nearest with the
    same but for white space and forms of Unicode (NFKC). None where there is no such place.
    """
    stripped = text.strip()
    begin = start + len(text) - len(text.lstrip())
    if context[begin : begin + len(stripped)] == stripped:
        return Answer(text, begin, begin + len(stripped)), False
    spans = _occurrences(context, stripped)
    if not spans:
        folded, places = _fold(context)
        spans = [(places[a][0], places[b - 1][1]) for a, b in _occurrences(folded, _fold(stripped)[0])]
    if not spans:
        return None, True
    first, last = min(spans, key=lambda span: abs(span[0] - start))
    return Answer(text, first, last), True


def _occurrences(text: str, part: str) -> list[tuple[int, int]]:
    places, at = [], text.find(part) if part else -1
    while at >= 0:
        places.append((at, at + len(part)))
        at = text.find(part, at + 1)
    return places


def _fold(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text in NFKC with single spaces, and for each of its characters begin and end in the original."""
    characters, places = list[str](), list[tuple[int, int]]()
    begin = 0
    while begin < len(text):
        end = begin + 1
        while end < len(text) and unicodedata.combining(text[end]):  # a letter with its marks is one
            end += 1
        for character in unicodedata.normalize("NFKC", text[begin:end]):
            if not character.isspace():
                characters.append(character)
                places.append((begin, end))
            elif characters and characters[-1] != " ":
                characters.append(" ")
                places.append((begin, end))
        begin = end
    return "".join(characters).rstrip(), places
