"""Answers from logits: the best over all windows by brute force, and thresholds as SQuAD 2.0's script sets them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm.config import TaskConfig
from megatfm.corpus.corpus import Corpus
from megatfm.tasks.corpus import prepare_corpus
from megatfm.tasks.span_predictions import SpanPredictions, read_annotations, shows_most_context
from megatfm.tasks.text_metrics import best_threshold
from megatfm.tokenizers import load
from tests.support.task_folders import WORDS_OF_QUESTIONS, questions, save_bert, write_lines


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
    rows = questions(10, seed, no_answer=0.4)
    write_lines(folder / "x.jsonl", rows)
    options = {"form": "span_extraction", "train": "x.jsonl", "no_answer": True, "stride": 5, **values}
    config = TaskConfig.model_validate(options)
    tokenizer = load(folder / "bert/tokenizer.json")
    corpus = prepare_corpus(str(folder / "x.jsonl"), config, tokenizer, 20, folder / "corpora")

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
        assert [c.score for c in question.candidates] == sorted(
            (c.score for c in question.candidates), reverse=True
        )


def test_no_answer_is_scored_by_the_first_token_of_the_least_window(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 2)

    for question in answered.questions:
        numbers = [
            number for number, facts in read_annotations(answered.corpus) if facts["row"] == question.row
        ]
        firsts = [
            float(answered.logits[answered.examples == number][0].astype(float).sum()) for number in numbers
        ]
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


def test_the_best_threshold_by_brute_force() -> None:
    random = np.random.default_rng(4)
    for _ in range(100):
        n = int(random.integers(1, 12))
        has_answer, scores = random.random(n) < 0.6, random.choice([0.0, 0.5, 1.0], n)
        scores = np.where(has_answer, scores, 0.0)
        differences = random.normal(size=n)

        def mean(threshold: float, d: Any = differences, s: Any = scores, h: Any = has_answer) -> float:
            return float(np.where(d <= threshold, s, ~h).mean())

        value, threshold = best_threshold(scores, has_answer, differences)
        assert value == pytest.approx(max([mean(-np.inf), *map(mean, differences)]))
        none_answered = value == pytest.approx(mean(-np.inf))
        assert none_answered or mean(threshold) == pytest.approx(value)


def test_a_part_of_the_windows_gives_a_part_of_the_questions(tmp_path: Path) -> None:
    answered, _ = predictions(tmp_path, 5)
    seen = answered.examples >= 4
    some = SpanPredictions(
        answered.task, answered.corpus, answered.examples[seen], answered.words[seen], answered.logits[seen]
    )
    assert 0 < len(some.questions) <= 10
    assert 0 <= some.metrics()["f1"] <= 1
