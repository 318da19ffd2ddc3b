"""Choices as transformers frames them, each a part of one example; what can't be is named by its row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatfm import tokenizers
from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.examples import ExampleFormat
from megatfm.tasks.labelled_texts import ChoiceEncoder, LabelledTextEncoder
from megatfm.tasks.predictions import Predictions, join_choices
from tests.support.finetuning_tasks import bert

__all__ = ["bert"]  # a fixture

ROW = {"text": "the old lamp", "ask": "where was", "choices": ["Bern", "the red Rome"], "label": 1}


def task(**values: Any) -> TaskConfig:
    usual = {"form": "multiple_choice", "train": "x.jsonl", "choices": ["choices"], "text_pair": "ask"}
    return TaskConfig.model_validate(usual | values)


def encode(bert: Path, rows: list[Any], length: int = 64, *, is_causal: bool = False, **values: Any) -> Any:
    tokenizer = tokenizers.load(bert / "tokenizer.json")
    return ChoiceEncoder(
        "x.jsonl", task(**values), tokenizer, ExampleFormat(length, is_causal=is_causal), with_labels=True
    ).encode(rows)


@pytest.mark.parametrize("length", [64, 18])
def test_each_choice_is_framed_as_by_transformers(bert: Path, length: int) -> None:
    (example,), notes = encode(bert, [ROW], length, too_long="truncate")
    library = transformers.AutoTokenizer.from_pretrained(bert)
    seconds = [f"{ROW['ask']} {choice}" for choice in ROW["choices"]]
    framed = [
        library(ROW["text"], second, truncation="longest_first", max_length=length // 2, return_token_type_ids=True)
        for second in seconds
    ]
    facts = example.annotation
    starts = [*facts["starts"], len(example.tokens)]
    for number, one in enumerate(framed):
        assert example.tokens[starts[number] : starts[number + 1]].tolist() == one["input_ids"]
        assert facts["second"][number] - starts[number] == one["token_type_ids"].index(1)
    assert facts["at"] == facts["starts"]
    assert facts["labels"] == [1]
    assert bool(notes) == (length == 18)


def test_a_decoder_reads_text_and_question_before_the_choice(bert: Path) -> None:
    (example,), _ = encode(bert, [ROW], is_causal=True)
    tokenizer = tokenizers.load(bert / "tokenizer.json")
    parts = np.split(example.tokens, example.annotation["starts"][1:])
    for part, choice in zip(parts, ROW["choices"], strict=True):
        first, last = (tokenizer.encode(text).tolist() for text in ("the old lamp where was", choice))
        assert part.tolist() == [tokenizer.bos, *first, tokenizer.sep, *last, tokenizer.cls]
    assert example.annotation["at"] == [at - 1 for at in (*example.annotation["starts"][1:], len(example.tokens))]


@pytest.mark.parametrize(("change", "config", "message"), [
    ({"choices": ["Bern"]}, {}, "row 2: column 'choices' is .*give a list of two or more choices"),
    ({"choices": "Bern"}, {}, "row 2: column 'choices' is 'Bern': give a list"),
    ({"choices": ["Bern", ""]}, {}, "row 2: column 'choices' is empty"),
    ({"label": 2}, {}, "row 2: label '2' is none of its 2 choices"),
    ({"label": -1}, {}, "row 2: label '-1' is no number of a choice, from 0"),
    ({"label": "B"}, {}, "row 2: label 'B' is no number of a choice, from 0: name the choices in task.labels"),
    ({"label": "C"}, {"labels": ["1", "B"]}, "row 2: label 'C' is none of the task's"),
    ({"choices": ["a", "b", "c"]}, {"labels": ["1", "2"]}, "row 2: has 3 choices, and task.labels names 2: name all"),
    ({"label": None}, {}, "row 2: label 'None' is no number"),
    ({"text": ""}, {}, "row 2: column 'text' is empty"),
    ({"text": "the " * 40}, {}, "row 2: has 2 choices, which share a row, of up to 45 tokens, and needs 96 of data"),
    ({}, {"choices": ["a", "b"]}, "has no column 'a', which task.choices names"),
])  # fmt: skip
def test_bad_rows_are_named(bert: Path, change: dict[str, Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"x.jsonl.*{message}"):
        encode(bert, [ROW, ROW | change], **config)


def test_columns_and_names_of_choices(bert: Path) -> None:
    columns = {"text": "the", "a": "Bern", "b": "Rome", "label": "B", "ask": "was"}
    (first,), _ = encode(bert, [columns], choices=["a", "b"], labels=["A", "B"])
    listed = {
        "text": "the", "choices": {"text": ["Bern", "Rome"], "label": ["A", "B"]}, "label": "1", "ask": "was",
    }  # fmt: skip
    (second,), _ = encode(bert, [listed])
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.annotation == second.annotation


@pytest.mark.parametrize(("values", "message"), [
    ({"choices": []}, "choices: name the columns of the choices for form = 'multiple_choice'"),
    ({"form": "classification"}, "choices: name the columns"),
    ({"both_orders": True}, "both_orders: is for pairs with a label"),
    ({"no_answer": True}, "no_answer: is for form = 'span_extraction'"),
    ({"text_metrics": ["bleu"]}, "text_metrics: is for form = 'generation'"),
    *(
        ({"form": form, "choices": [], "labels": ["a", "b"]}, f"labels: is for .*, and this one is '{form}'")
        for form in ("regression", "span_extraction", "generation", "chat", "preference")
    ),
    ({"prefix": "question: "}, "prefix: is for form = 'generation'"),
    ({"chat_template": "chat.jinja"}, "chat_template: is for form = 'chat' or 'preference'"),
])  # fmt: skip
def test_keys_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**values)


def test_choices_are_joined_by_example() -> None:
    examples, choices = np.array([4, 1, 1, 4, 1, 9]), np.array([1, 0, 2, 0, 1, 0])
    logits = np.array([[3.0], [-1], [-5], [2], [-2], [0]], np.float32)
    numbers, words, joined, right = join_choices(examples, choices, logits, np.array([0, 0, 1, 1, 0, 1]))
    assert numbers.tolist() == [1, 4, 9]
    none = -np.inf
    assert joined.tolist() == [[-1, -2, -5], [2, 3, none], [0, none, none]]
    assert right.tolist() == [2, 0, 0]
    joined_predictions = Predictions(task(), numbers, words, joined, right)
    assert joined_predictions.metrics() == {"accuracy": pytest.approx(1 / 3)}
    rows = list(joined_predictions.rows())
    assert [row["label"] for row in rows] == ["0", "1", "0"]
    assert [list(row["probabilities"]) for row in rows] == [["0", "1", "2"], ["0", "1"], ["0"]]
    assert rows[1]["probability"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)


def test_a_predictions_file_takes_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has one softmax, not one for each line."""
    n_examples, calls = 50, []
    monkeypatch.setattr(np, "exp", lambda x, exp=np.exp: calls.append(1) or exp(x))
    config = TaskConfig.model_validate({"train": "x.csv", "labels": ["no", "yes"]})
    numbers, logits = np.arange(n_examples), np.zeros((n_examples, 2), np.float32)
    rows = list(Predictions(config, numbers, np.zeros_like(numbers), logits, np.zeros_like(numbers)).rows())
    assert [row["row"] for row in rows] == list(range(1, n_examples + 1))
    assert len(calls) == 1


def test_a_pair_in_both_orders_is_two_texts(bert: Path) -> None:
    tokenizer = tokenizers.load(bert / "tokenizer.json")
    values = {"train": "x.csv", "labels": ["no", "yes"], "text_pair": "other", "both_orders": True}
    config = TaskConfig.model_validate(values)
    row = {"text": "the old lamp", "other": "Bern", "label": "yes"}
    (example,), _ = LabelledTextEncoder("x.csv", config, tokenizer, ExampleFormat(20), True).encode([row])
    library = transformers.AutoTokenizer.from_pretrained(bert)
    ways = [library("the old lamp", "Bern")["input_ids"], library("Bern", "the old lamp")["input_ids"]]
    assert example.tokens.tolist() == ways[0] + ways[1]
    assert example.annotation == {"at": [0, 7], "labels": [1], "starts": [0, 7], "second": [5, 10]}
    with pytest.raises(UsageError, match=r"has 22 tokens, more than data\.sequence_length = 20"):
        LabelledTextEncoder("x.csv", config, tokenizer, ExampleFormat(20), True).encode(
            [row | {"text": "the old lamp was red and new"}]
        )
