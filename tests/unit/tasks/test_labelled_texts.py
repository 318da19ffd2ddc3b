"""Rows are framed as transformers' tokenizers frame them, with their labels; what is wrong is named by its row."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
import transformers
from pydantic import ValidationError
from tokenizers import models, normalizers, pre_tokenizers, processors

from megatfm import tokenizers
from megatfm.config import TaskConfig
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from megatfm.tasks.answers import AnswerEncoder
from megatfm.tasks.corpus import compute_class_weights, prepare_corpus, read_labels
from megatfm.tasks.examples import ExampleFormat, build_frame, truncate_longest
from megatfm.tasks.files import collect_labels, format_label
from megatfm.tasks.labelled_texts import ChoiceEncoder, LabelledTextEncoder
from megatfm.tasks.spans import SpanEncoder
from megatfm.tokenizers import Tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"]
FRAMES: dict[str, tuple[list[str], Any]] = {
    "bert": (["[CLS]", "[SEP]"], processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))),
    "roberta": (["<s>", "</s>"], processors.RobertaProcessing(("</s>", 3), ("<s>", 2))),
    "template": (
        ["[CLS]", "[SEP]"],
        processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] [CLS] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        ),
    ),
}


def save_tokenizer(folder: Path, kind: str) -> Tokenizer:
    marks, processor = FRAMES[kind]
    vocabulary = ["[UNK]", "[PAD]", *marks, *WORDS]
    built = library.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "[UNK]"))
    built.normalizer = normalizers.BertNormalizer(lowercase=False)
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.add_special_tokens(vocabulary[: 2 + len(marks)])
    built.post_processor = processor
    built.save(str(folder / "tokenizer.json"))
    return tokenizers.load(folder / "tokenizer.json")


def task(**values: Any) -> TaskConfig:
    return TaskConfig.model_validate({"train": "x.csv", "labels": ["no", "yes"], **values})


def rows_of(*rows: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"text": "the cat sat", "pair": "a mat", "label": "yes", **row} for row in rows]


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("length", [64, 9])
def test_frames_are_those_of_transformers(tmp_path: Path, kind: str, pair: bool, length: int) -> None:
    actual = save_tokenizer(tmp_path, kind)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    texts = ["the cat sat on a mat and saw it", "cat"], ["it sat", "the mat and the cat and it"]
    rows = rows_of(*({"text": a, "pair": b} for a, b in zip(*texts, strict=True)))
    config = task(text_pair="pair" if pair else None, too_long="truncate")
    examples, _ = LabelledTextEncoder("x.csv", config, actual, ExampleFormat(length), True).encode(rows)
    for example, a, b in zip(examples, *texts, strict=True):
        expected = reference(
            a, b if pair else None, truncation="longest_first", max_length=length, return_token_type_ids=True,
        )  # fmt: skip
        assert example.tokens.tolist() == expected["input_ids"]
        segments = (np.arange(len(example.tokens)) >= example.annotation.get("second", 99)).tolist()
        if kind != "roberta":  # whose model has no segments
            assert segments == [bool(value) for value in expected["token_type_ids"]]


def test_pairs_are_cut_as_the_tokenizers_library_cuts_them() -> None:
    """The second of two equally long texts keeps one more of an odd number of tokens."""
    words = library.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    for n_first, n_second, room in itertools.product(range(1, 9), range(1, 9), range(2, 14)):
        texts = " ".join("a" * n_first), " ".join("b" * n_second)
        expected = fast(*texts, truncation="longest_first", max_length=room)["input_ids"]
        first, second = truncate_longest(np.zeros(n_first, np.int64), np.ones(n_second, np.int64), room)
        assert second is not None
        assert [*first.tolist(), *second.tolist()] == expected, (n_first, n_second, room)


def test_the_longer_text_is_cut_first() -> None:
    first, second = np.arange(10), np.arange(100, 104)
    for room in range(1, 15):
        a, b = truncate_longest(first, second, room)
        assert b is not None
        assert len(a) + len(b) == min(room, 14)
        assert a.tolist() == first[: len(a)].tolist()
        assert abs(len(a) - len(b)) <= 1 or len(b) == 4


@pytest.mark.parametrize(("row", "config", "message"), [
    ({"text": "  "}, {}, "row 2: column 'text' is empty"),
    ({"text": None}, {}, "row 2: column 'text' is empty"),
    ({"text": 3}, {}, "row 2: column 'text' is 3, not text"),
    ({"label": "Yes"}, {}, "row 2: label 'Yes' is none of the task's.*there are: no, yes"),
    ({"label": None}, {}, "row 2: has no label"),
    ({"label": " "}, {}, "row 2: has no label"),
    ({"label": ["yes"]}, {}, r"row 2: label \['yes'\] is no single label: .* task.form = 'multilabel'"),
    ({"label": {"a": 1}}, {}, "row 2: label {'a': 1} is no single label"),
    ({"pair": ""}, {"text_pair": "pair"}, "row 2: column 'pair' is empty"),
    ({}, {"text_pair": "other"}, "no column 'other', which task.text_pair names"),
    ({"text": "cat " * 20}, {}, "row 2: has 22 tokens, more than data.sequence_length = 12"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, row: Mapping[str, Any], config: dict[str, Any], message: str) -> None:
    tokenizer = save_tokenizer(tmp_path, "bert")
    with pytest.raises(UsageError, match=f"x.csv.*{message}"):
        LabelledTextEncoder("x.csv", task(**config), tokenizer, ExampleFormat(12), True).encode(rows_of({}, row))


def test_a_text_of_which_no_token_is_left_is_refused(tmp_path: Path) -> None:
    """BERT's normalizer drops invisible characters."""
    tokenizer, row = save_tokenizer(tmp_path, "bert"), {"text": "cat", "pair": "the mat", "a": "a mat", "label": 0}

    def encode(row: dict[str, Any], **values: Any) -> Any:
        config = TaskConfig.model_validate({"train": "x", **values})
        row_of_32 = ExampleFormat(32)
        return {
            "multiple_choice": lambda: ChoiceEncoder("x", config, tokenizer, row_of_32, True),
            "span_extraction": lambda: SpanEncoder("x", config, tokenizer, row_of_32, False),
            "generation": lambda: AnswerEncoder("x", config, tokenizer, row_of_32),
        }.get(config.form, lambda: LabelledTextEncoder("x", config, tokenizer, row_of_32, True))().encode([row])

    pair = {"text": "text", "text_pair": "pair"}
    for column, values in (
        ("text", {"labels": ["0", "1"]}),
        ("pair", {"labels": ["0", "1"], **pair}),
        ("text", {"form": "multiple_choice", "choices": ["pair", "a"]}),
        ("a", {"form": "multiple_choice", "choices": ["pair", "a"]}),
        ("text", {"form": "span_extraction", **pair}),
        ("pair", {"form": "span_extraction", **pair}),
        ("pair", {"form": "generation", "label": "pair"}),
    ):
        encode(row, **values)
        with pytest.raises(UsageError, match=f"x, row 1: column '{column}' makes no token: give a text"):
            encode(row | {column: "\u200b\ufeff"}, **values)


def test_no_room_for_text_is_said(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "bert")
    with pytest.raises(UsageError, match="sequence_length = 2: leaves no room"):
        LabelledTextEncoder("x.csv", task(), tokenizer, ExampleFormat(2), True).encode(rows_of({}))


def test_labels_are_sorted_as_numbers_where_they_are_numbers() -> None:
    rows = [{"label": value} for value in ("10", 2, " 1 ", "-3", "b", True)]
    assert collect_labels(task(), rows) == ["-3", "1", "2", "10", "b", "true"]
    odd = ["\u00b2", "--3", "1" * 5000, "\u0663", "2"]
    assert collect_labels(task(), [{"label": value} for value in odd]) == ["2", "\u0663", "--3", "1" * 5000, "\u00b2"]
    assert format_label(False) == "false"
    with pytest.raises(UsageError, match="column 'label' is empty"):
        collect_labels(task(), [{"label": ""}, {"label": None}, {}])


@pytest.mark.parametrize(("lines", "message"), [
    (["a,x", "b,x"], "all rows have the label 'x', so that there is nothing to learn"),
    (["a,x", "b, x "], "all rows have the label 'x'"),
    (["a,x", "b,"], "all rows have the label 'x'"),
    (["a,x", "b,NaN"], "has the label 'NaN', as missing values are written"),
    (["a,1", "b,1.0"], "has the labels '1' and '1.0', two spellings of one"),
    (["a,caf\u00e9", "b,cafe\u0301"], "has the labels .*, two spellings of one"),
])  # fmt: skip
def test_labels_that_teach_nothing_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_labels(TaskConfig(train=str(tmp_path / "a.csv")))
    (tmp_path / "a.csv").write_text("text,label\na,0.5\nb,0.5\n")
    with pytest.raises(UsageError, match=r"all rows have the label '0\.5', .*: add rows of another label$"):
        read_labels(TaskConfig(train=str(tmp_path / "a.csv"), form="regression"))
    named = TaskConfig(train=str(tmp_path / "a.csv"), labels=["x", "NaN"])
    assert read_labels(named) == ["x", "NaN"]


def test_balanced_labels_weigh_as_those_of_scikit_learn(tmp_path: Path) -> None:
    """In tagging, all words count."""
    from sklearn.utils.class_weight import compute_class_weight

    labels, names = [*"aabaacaaab"], ["c", "a", "b"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"x,{label}\n" for label in labels))
    config = TaskConfig(train=str(tmp_path / "a.csv"), labels=names, class_weights="balanced")
    expected = compute_class_weight("balanced", classes=np.array(names), y=labels)
    assert compute_class_weights(config) == pytest.approx(expected, rel=1e-12)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x " * 10, "label": labels}) + "\n")
    tags = config.model_copy(update={"train": str(tmp_path / "b.jsonl"), "form": "tagging"})
    assert compute_class_weights(tags) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(UsageError, match=r"a.csv: no example has the label 'd', so that it can't be weighed"):
        compute_class_weights(config.model_copy(update={"labels": [*names, "d"]}))


def test_weights_are_as_many_as_labels() -> None:
    named = TaskConfig(train="a.csv", labels=["x", "y"], class_weights=[1, 5])
    assert compute_class_weights(named) == [1, 5]
    with pytest.raises(UsageError, match=r"task.class_weights has 2 weights for 3 labels \(x, y, z\)"):
        compute_class_weights(named.model_copy(update={"labels": ["x", "y", "z"]}))
    with pytest.raises(ValidationError, match="class_weights: are for form = 'classification' and 'tagging'"):
        TaskConfig(train="a.csv", form="regression", class_weights="balanced")


def test_a_file_is_tokenized_once_for_all_that_decides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = save_tokenizer(tmp_path, "bert")
    file = tmp_path / "x.csv"
    file.write_text("text,label\nthe cat,yes\na mat,no\n")

    def folder(config: TaskConfig, length: int = 16, *, with_labels: bool = True) -> Path:
        row = ExampleFormat(length)
        return prepare_corpus(str(file), config, tokenizer, row, tmp_path, with_labels=with_labels).folder

    first = folder(task())
    stamp = (first / "manifest.json").stat().st_mtime_ns
    assert folder(task(metric="f1")) == first
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    different = {folder(task(labels=["yes", "no"])), folder(task(), 12), folder(task(), with_labels=False)}
    file.write_text("text,label\nthe cat,no\na mat,no\n")
    assert len(different | {folder(task()), first}) == 5
    monkeypatch.setattr(ShardWriter, "finish", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        folder(task(), 10)
    assert not list(tmp_path.glob(".*partial"))


def test_a_tokenizer_without_marks_is_refused(tmp_path: Path) -> None:
    built = library.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "<s>": 2, "cat": 3}, "[UNK]"))
    built.add_special_tokens(["[UNK]", "<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="no tokens such as \\[CLS\\]"):
        build_frame(tokenizers.load(tmp_path / "tokenizer.json"), ExampleFormat(8))


def encode(
    tmp_path: Path, rows: list[Mapping[str, Any]], length: int = 16, *, is_causal: bool = False, **values: Any
) -> list:
    tokenizer, example_format = save_tokenizer(tmp_path, "bert"), ExampleFormat(length, is_causal=is_causal)
    return LabelledTextEncoder("x", task(**values), tokenizer, example_format, True).encode(rows)[0]


def test_a_decoder_reads_the_label_at_the_last_token(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "bert")
    (example,) = encode(tmp_path, rows_of({}), is_causal=True, text_pair="pair")
    a, b = (tokenizer.encode(text).tolist() for text in ("the cat sat", "a mat"))
    assert example.tokens.tolist() == [tokenizer.bos, *a, tokenizer.sep, *b, tokenizer.cls]
    assert example.annotation == {"at": [7], "labels": [1], "second": 5}


def test_numbers_and_many_labels(tmp_path: Path) -> None:
    (half,) = encode(tmp_path, [{"text": "cat", "label": "-0.5"}], form="regression", labels=[])
    assert half.annotation == {"at": [0], "labels": [[-0.5]]}
    rows = [{"text": "cat", "label": label} for label in ("yes; no", ["no"], "", None)]
    flags = [example.annotation["labels"][0] for example in encode(tmp_path, rows, form="multilabel")]
    assert flags == [[1, 1], [1, 0], [0, 0], [0, 0]]
    for label in ("much", "nan", "", None, True):
        with pytest.raises(UsageError, match=r"x, row 1: column 'label' is .*: give a number"):
            encode(tmp_path, [{"text": "cat", "label": label}], form="regression", labels=[])


def test_a_tag_stands_at_the_first_piece_of_its_word(tmp_path: Path) -> None:
    rows = [{"text": ["the", "cat saw", "mat"], "label": ["no", "yes", "no"]}, {"text": "a cat", "label": "yes no"}]
    first, second = encode(tmp_path, rows, form="tagging")
    assert first.annotation == {"at": [1, 2, 4], "labels": [0, 1, 0]}
    assert second.annotation == {"at": [1, 2], "labels": [1, 0]}
    (cut,) = encode(tmp_path, rows[:1], 5, form="tagging", too_long="truncate")
    assert cut.annotation == {"at": [1, 2], "labels": [0, 1]}
    for bad, message in (
        ({"label": ["no"]}, "has 3 words and 1 tags"),
        ({"text": []}, "column 'text' is empty"),
        ({"text": 4}, "column 'text' is 4, no list"),
        ({"text": ["the", " ", "cat"]}, "word 2, '', makes no token"),
    ):
        with pytest.raises(UsageError, match=f"x, row 1: {message}"):
            encode(tmp_path, [rows[0] | bad], form="tagging")
