"""Windows as transformers cuts them, answers by their characters, and what can't be is named by its row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatfm import tokenizers
from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.files import read_rows
from megatfm.tasks.spans import SpanEncoder, find_answer
from tests.support.task_folders import WORDS_OF_QUESTIONS, questions, save_bert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bert")
    save_bert(folder, WORDS_OF_QUESTIONS)
    return folder


def task(**values: Any) -> TaskConfig:
    return TaskConfig.model_validate({"form": "span_extraction", "train": "x.json", **values})


def encode(bert: Path, rows: list[Mapping[str, Any]], length: int = 24, **values: Any) -> Any:
    encoder = SpanEncoder("x.json", task(**values), tokenizers.load(bert / "tokenizer.json"), length, True)
    return encoder.encode(rows)


@pytest.mark.parametrize("length", [12, 16, 24, 64])
@pytest.mark.parametrize("stride", [1, 3, 8, 128])
def test_windows_are_those_of_transformers(bert: Path, length: int, stride: int) -> None:
    rows = questions(6, seed=5)
    windows, notes = encode(bert, rows, length, stride=stride)
    library = transformers.AutoTokenizer.from_pretrained(bert)
    expected = []
    for row in rows:
        room = length - len(library(row["question"])["input_ids"]) - 1
        cut = library(
            row["question"], row["context"], truncation="only_second", max_length=length,
            stride=max(0, room - stride), return_overflowing_tokens=True, return_token_type_ids=True,
        )  # fmt: skip
        expected += list(zip(cut["input_ids"], cut["token_type_ids"], strict=True))
    assert [window.tokens.tolist() for window in windows] == [tokens for tokens, _ in expected]
    for window, (_, segments) in zip(windows, expected, strict=True):
        assert window.annotation["second"] == segments.index(1)
    assert notes[0] == f"x.json: 6 questions in {len(windows)} windows"


@pytest.mark.parametrize("length", [14, 24])
def test_labels_point_at_the_answer_or_at_the_first_token(bert: Path, length: int) -> None:
    rows, labelled = questions(20, seed=7), 0
    for window in encode(bert, rows, length, stride=4)[0]:
        row, facts = rows[window.annotation["row"]], window.annotation
        ((begin, end),) = facts["labels"]
        (answer,) = row["answers"]
        stop = answer["answer_start"] + len(answer["text"])
        inside = facts["offsets"][0][0] <= answer["answer_start"] and stop <= facts["offsets"][-1][1]
        assert (begin > 0) == inside
        if inside:
            labelled += 1
            spans = facts["offsets"][begin - facts["first"] : end - facts["first"] + 1]
            assert row["context"][spans[0][0] : spans[-1][1]] == answer["text"]
        else:
            assert (begin, end) == (0, 0)
    assert labelled >= 20, "each answer lies in a window"


@pytest.mark.parametrize(
    ("context", "text", "start", "begin", "moved"),
    [
        ("in Bern and Rome", "Bern", 3, 3, False),
        ("in Bern and Rome", " Bern ", 2, 3, False),
        ("in Bern and Bern", "Bern", 13, 12, True),
        ("in Bern and Bern", "Bern", 0, 3, True),
        ("in  New\u00a0York now", "New York", 99, 4, True),
        ("at the Cafe\u0301 here", "Café", 0, 7, True),
        ("by a \ufb01ne man", "fine", 5, 5, True),
        ("昨日は東京にいた", "東京", 3, 3, False),
        ("昨日は東京にいた", "東京", 0, 3, True),
        ("Ⅳ. Henry", "IV.", 0, 0, True),
    ],
)
def test_answers_are_found_where_they_stand(
    context: str, text: str, start: int, begin: int, moved: bool
) -> None:
    answer, is_moved = find_answer(context, text, start)
    assert answer is not None
    assert (answer.begin, is_moved) == (begin, moved)
    assert answer.text == text, "as the file spells it, for the metrics"
    assert answer.end > answer.begin
    if context.startswith("at"):
        assert context[answer.begin : answer.end] == "Cafe\u0301"


def test_an_answer_that_is_not_there_is_none() -> None:
    assert find_answer("in Bern", "Rome", 0)[0] is None
    assert find_answer("in Bern", "bern", 3)[0] is None, "another case is another word"


ROW = {
    "id": "a",
    "question": "where ?",
    "context": "the old lamp was in Bern .",
    "answers": [{"text": "Bern", "answer_start": 20}],
}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"answers": [{"text": "Rome", "answer_start": 3}]}, {}, "answer 'Rome' is not in column 'context'"),
        ({"answers": []}, {}, "has no answer: take it out, or set task.no_answer=true"),
        ({"answers": {"text": ["a"], "answer_start": []}}, {}, "lacks the lists 'text' and 'answer_start'"),
        ({"answers": "Bern"}, {}, "column 'answers' is 'Bern': give objects with text and answer_start"),
        ({"answers": [{"text": "Bern"}]}, {}, "lacks a text or its answer_start"),
        ({"answers": [{"text": " ", "answer_start": 1}]}, {}, "lacks a text or its answer_start"),
        ({"answers": [{"text": "Bern", "answer_start": -1}]}, {}, "lacks a text or its answer_start"),
        ({"context": " "}, {}, "column 'context' is empty"),
        ({"question": None}, {}, "column 'question' is empty"),
        ({"id": "b"}, {}, "has id 'b', as row 1 has: give each question its own"),
        (
            {"question": "where " * 9},
            {"max_question_tokens": 8},
            "question has 9 tokens, more than task.max_question",
        ),
        (
            {"question": "where " * 30},
            {},
            "sequence_length = 24 has no room for text beside the question's 30 tokens",
        ),
        ({}, {"text": "asked"}, "has no column 'asked', which task.text names"),
        ({"is_impossible": True}, {}, "has no answer"),
    ],
)
def test_bad_rows_are_named(bert: Path, change: dict[str, Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"x\.json.*{message}") as raised:
        encode(bert, [ROW | {"id": "b"}, ROW | change], **config)
    assert "row 2" in str(raised.value) or "no column" in str(raised.value)


def test_what_was_cut_or_moved_is_told(bert: Path) -> None:
    asked = ROW | {"question": "where " * 9}
    _, notes = encode(bert, [asked], max_question_tokens=8, too_long="truncate")
    assert "x.json: 1 questions cut to 8 tokens" in notes
    _, notes = encode(bert, [ROW | {"answers": [{"text": "Bern", "answer_start": 2}]}])
    assert any("1 answers stand elsewhere than answer_start" in note for note in notes)


def test_both_spellings_of_answers_are_the_same(bert: Path) -> None:
    listed = {"text": ["Bern"], "answer_start": [20]}
    one, other = (encode(bert, [ROW | {"answers": answers}])[0] for answers in (ROW["answers"], listed))
    assert one[0].annotation == other[0].annotation
    none, _ = encode(bert, [ROW | {"answers": {"text": [], "answer_start": []}}], no_answer=True)
    assert none[0].annotation["labels"] == [[0, 0]]
    assert none[0].annotation["answers"] == []


def test_special_tokens_that_a_text_spells_are_text(bert: Path) -> None:
    context = "the [SEP] lamp was in Bern ."
    row = ROW | {"context": context, "answers": [{"text": "Bern", "answer_start": context.index("Bern")}]}
    (window,), _ = encode(bert, [row])
    assert window.tokens.tolist().count(3) == 2


def test_a_file_of_squad_is_read(tmp_path: Path) -> None:
    asked = {"id": "1", "question": "where ?", "answers": [{"text": "Bern", "answer_start": 3}]}
    content = (
        '{"version": "1.1",\n "data": [{"title": "T", "paragraphs": [{"context": "in Bern", "qas": [%s]}]}]}'
    )
    (tmp_path / "dev.json").write_text(content % json.dumps(asked))
    assert read_rows(tmp_path / "dev.json") == [{"title": "T", "context": "in Bern", **asked}]
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": [{"qas": [{}]}]}]}')
    with pytest.raises(UsageError, match=r"bad\.json: begins as a file of SQuAD, but lacks its data"):
        read_rows(tmp_path / "bad.json")


def test_a_tokenizer_without_places_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a tokenizer\.json, whose tokens have offsets"):
        SpanEncoder("x.json", task(), object(), 24, True).encode([ROW])  # type: ignore[arg-type]
