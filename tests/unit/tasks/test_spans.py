"""Windows as transformers cuts them; answers from logits, by brute force and as SQuAD 2.0's script does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatfm import tokenizers
from megatfm.config import TaskConfig
from megatfm.corpus.corpus import Corpus
from megatfm.errors import MegatfmError, UsageError
from megatfm.tasks.corpus import prepare_corpus
from megatfm.tasks.examples import ExampleFormat
from megatfm.tasks.files import read_rows
from megatfm.tasks.metrics import find_best_threshold
from megatfm.tasks.span_predictions import SpanPredictions, read_annotations, shows_most_context
from megatfm.tasks.spans import SpanEncoder, find_answer
from megatfm.tokenizers import load
from tests.support.files import write_lines
from tests.support.finetuning_tasks import WORDS_OF_QUESTIONS, bert, make_questions, save_bert

__all__ = ["bert"]  # a fixture


def task(**values: Any) -> TaskConfig:
    return TaskConfig.model_validate({"form": "span_extraction", "train": "x.json", **values})


def encode(bert: Path, rows: list[Mapping[str, Any]], length: int = 24, **values: Any) -> Any:
    encoder = SpanEncoder(
        "x.json", task(**values), tokenizers.load(bert / "tokenizer.json"), ExampleFormat(length), with_labels=True
    )
    return encoder.encode(rows)


@pytest.mark.parametrize("length", [12, 16, 24, 64])
@pytest.mark.parametrize("stride", [1, 3, 8, 128])
def test_windows_are_those_of_transformers(bert: Path, length: int, stride: int) -> None:
    rows = make_questions(6, seed=5)
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
    assert notes[0] == f"x.json: 6 questions are read in {len(windows)} windows"


@pytest.mark.parametrize("length", [14, 24])
def test_labels_point_at_the_answer_or_at_the_first_token(bert: Path, length: int) -> None:
    rows, labelled = make_questions(20, seed=7), 0
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


@pytest.mark.parametrize(("context", "text", "start", "begin", "moved"), [
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
])  # fmt: skip
def test_answers_are_found_where_they_stand(context: str, text: str, start: int, begin: int, moved: bool) -> None:
    answer, is_moved = find_answer(context, text, start)
    assert answer is not None
    assert (answer.begin, is_moved) == (begin, moved)
    assert answer.text == text, "as the file spells it, for the metrics"
    assert answer.end > answer.begin
    if context.startswith("at"):
        assert context[answer.begin : answer.end] == "Cafe\u0301"


def test_a_missing_answer_is_none() -> None:
    assert find_answer("in Bern", "Rome", 0)[0] is None
    assert find_answer("in Bern", "bern", 3)[0] is None, "another case is another word"


ANSWER = {"text": "Bern", "answer_start": 20}
ROW = {"id": "a", "question": "where ?", "context": "the old lamp was in Bern .", "answers": [ANSWER]}


@pytest.mark.parametrize(("change", "config", "message"), [
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
    ({"question": "where " * 9}, {"max_question_tokens": 8}, "question has 9 tokens, more than task.max_question"),
    ({"question": "where " * 30}, {}, "sequence_length = 24 has no room for text beside the question's 30 tokens"),
    ({}, {"text": "asked"}, "has no column 'asked', which task.text names"),
    ({"is_impossible": True}, {}, "has no answer"),
])  # fmt: skip
def test_bad_rows_are_named(bert: Path, change: dict[str, Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"x\.json.*{message}") as raised:
        encode(bert, [ROW | {"id": "b"}, ROW | change], **config)
    assert "row 2" in str(raised.value) or "no column" in str(raised.value)


def test_cut_questions_and_moved_answers_are_logged(bert: Path) -> None:
    asked = ROW | {"question": "where " * 9}
    _, notes = encode(bert, [asked], max_question_tokens=8, too_long="truncate")
    assert "x.json: 1 questions are cut to 8 tokens" in notes
    _, notes = encode(bert, [ROW | {"answers": [{"text": "Bern", "answer_start": 2}]}])
    assert any("1 answers stand elsewhere than answer_start" in note for note in notes)


def test_both_spellings_of_answers_are_the_same(bert: Path) -> None:
    listed = {"text": ["Bern"], "answer_start": [20]}
    from_objects, from_lists = (encode(bert, [ROW | {"answers": answers}])[0] for answers in (ROW["answers"], listed))
    assert from_lists[0].annotation == from_objects[0].annotation
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
    content = '{"version": "1.1",\n "data": [{"title": "T", "paragraphs": [{"context": "in Bern", "qas": [%s]}]}]}'
    (tmp_path / "dev.json").write_text(content % json.dumps(asked))
    assert read_rows(tmp_path / "dev.json") == [{"title": "T", "context": "in Bern", **asked}]
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": [{"qas": [{}]}]}]}')
    with pytest.raises(UsageError, match=r"bad\.json: begins as a file of SQuAD, but lacks its data"):
        read_rows(tmp_path / "bad.json")


def test_a_tokenizer_without_places_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a tokenizer\.json, whose tokens have offsets"):
        SpanEncoder("x.json", task(), object(), ExampleFormat(24), True).encode([ROW])  # type: ignore[arg-type]


def is_max_context(spans: list[tuple[int, int]], current: int, position: int) -> bool:
    """BERT's `_check_is_max_context`, for spans of (start, length)."""
    best_score, best_index = None, None
    for index, (start, length) in enumerate(spans):
        end = start + length - 1
        if position < start or position > end:
            continue
        score = min(position - start, end - position) + 0.01 * length
        if best_score is None or score > best_score:
            best_score, best_index = score, index
    return current == best_index


def test_the_window_with_most_context_is_bert_s() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        total, room, stride = (int(random.integers(*limits)) for limits in ((5, 40), (3, 20), (1, 12)))
        begins = [0]
        while begins[-1] + room < total:
            begins.append(begins[-1] + min(room, stride))
        sizes = [min(room, total - begin) for begin in begins]
        for token in range(total):
            for number in range(len(begins)):
                expected = is_max_context(list(zip(begins, sizes, strict=True)), number, token)
                assert shows_most_context(number, token, begins, sizes) == expected


def predictions(folder: Path, seed: int, **values: Any) -> tuple[SpanPredictions, list[dict[str, Any]]]:
    """Random logits of the windows of ten questions."""
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    rows = make_questions(10, seed, no_answer=0.4)
    write_lines(folder / "x.jsonl", rows)
    options = {"form": "span_extraction", "train": "x.jsonl", "no_answer": True, "stride": 5, **values}
    config = TaskConfig.model_validate(options)
    tokenizer = load(folder / "bert/tokenizer.json")
    corpus = prepare_corpus(str(folder / "x.jsonl"), config, tokenizer, ExampleFormat(20), folder / "corpora")

    opened, random = Corpus.open(corpus.folder), np.random.default_rng(seed)
    lengths = opened.lengths()
    examples = np.repeat(np.arange(len(lengths)), lengths)
    words = np.concatenate([np.arange(n) for n in lengths])
    logits = random.normal(size=(len(words), 2)).astype(np.float32)
    return SpanPredictions(config, str(corpus.folder), examples, words, logits), rows


def brute_force(answered: SpanPredictions, row: int, context: str) -> dict[tuple[int, int], float]:
    """Scores of all answers in all windows, by characters."""

    windows = [(number, facts) for number, facts in read_annotations(answered.corpus) if facts["row"] == row]
    spans = [(facts["window"][0], len(facts["offsets"])) for _, facts in windows]
    scores: dict[tuple[int, int], float] = {}
    for place, (number, facts) in enumerate(windows):
        logits = answered.logits[answered.examples == number].astype(float)
        offsets, first = facts["offsets"], facts["first"]
        for begin in range(len(offsets)):
            if not is_max_context(spans, place, facts["window"][0] + begin):
                continue
            for end in range(begin, min(len(offsets), begin + answered.task.max_answer_tokens)):
                span = (offsets[begin][0], offsets[end][1])
                score = logits[first + begin, 0] + logits[first + end, 1]
                scores[span] = max(score, scores.get(span, -np.inf))
    return scores


def test_the_best_answer_is_the_best_over_all_windows(tmp_path: Path) -> None:
    answered, rows = predictions(tmp_path, 1, max_answer_tokens=4, n_best=20)
    assert [question.row for question in answered.questions] == list(range(10))
    for question in answered.questions:
        scores = brute_force(answered, question.row, question.context)
        span = max(scores, key=scores.__getitem__)
        best = question.candidates[0]
        assert (best.begin, best.end) == span
        assert best.score == pytest.approx(scores[span])
        assert question.best == rows[question.row]["context"][span[0] : span[1]]
        assert [c.score for c in question.candidates] == sorted((c.score for c in question.candidates), reverse=True)


def test_no_answer_is_scored_by_the_first_token_of_the_least_window(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 2)

    for question in answered.questions:
        numbers = [number for number, facts in read_annotations(answered.corpus) if facts["row"] == question.row]
        firsts = [float(answered.logits[answered.examples == number][0].astype(float).sum()) for number in numbers]
        assert question.null_score == pytest.approx(min(firsts))


def test_under_the_threshold_is_an_answer(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 3)
    differences = sorted(question.difference for question in answered.questions)
    for threshold in (-100.0, differences[4], 100.0):
        fixed = SpanPredictions(
            answered.task, answered.corpus, answered.examples, answered.words, answered.logits, threshold
        )
        is_answered = [bool(row["answer"]) for row in fixed.rows()]
        assert is_answered == [question.difference <= threshold for question in fixed.questions]
    metrics = SpanPredictions(
        answered.task, answered.corpus, answered.examples, answered.words, answered.logits, -100.0
    ).metrics()
    assert metrics["no_answer_f1"] == metrics["no_answer_exact_match"] == 1
    assert metrics["has_answer_f1"] == 0


def test_answers_from_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 3)
    names = answered.metrics().keys()
    logits = answered.logits.copy()
    logits[5] = np.nan
    broken = SpanPredictions(answered.task, answered.corpus, answered.examples, answered.words, logits)
    metrics = broken.metrics()
    assert metrics.keys() == names
    assert np.isnan([*metrics.values()]).all()
    with pytest.raises(MegatfmError, match="logits are not finite"):
        list(broken.rows())


def test_the_best_threshold_by_brute_force() -> None:
    random = np.random.default_rng(4)
    for _ in range(100):
        n = int(random.integers(1, 12))
        has_answer, scores = random.random(n) < 0.6, random.choice([0.0, 0.5, 1.0], n)
        scores = np.where(has_answer, scores, 0.0)
        differences = random.normal(size=n)

        def mean(threshold: float, d: Any = differences, s: Any = scores, h: Any = has_answer) -> float:
            return float(np.where(d <= threshold, s, ~h).mean())

        value, threshold = find_best_threshold(scores, has_answer, differences)
        assert value == pytest.approx(max([mean(-np.inf), *map(mean, differences)]))
        none_answered = value == pytest.approx(mean(-np.inf))
        assert none_answered or mean(threshold) == pytest.approx(value)


def test_a_part_of_the_windows_gives_a_part_of_the_questions(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 5)
    has_windows = answered.examples >= 4
    some = SpanPredictions(
        answered.task, answered.corpus, answered.examples[has_windows], answered.words[has_windows],
        answered.logits[has_windows],
    )  # fmt: skip
    assert 0 < len(some.questions) <= 10
    assert 0 <= some.metrics()["f1"] <= 1
