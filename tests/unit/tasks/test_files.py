"""Labelled files of every kind give the same rows; what is wrong with one is named by its line."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.corpus import read_labels
from megatfm.tasks.files import read_rows, require_columns

ROWS = [{"text": 'He said "ja,\nnein"', "label": "gut"}, {"text": "日本語 — \t x", "label": "schlecht"}]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    lines = ['"He said ""ja,\nnein""",gut', "日本語 — \t x,schlecht"]
    (tmp_path / "a.csv").write_text("\n".join(["\ufefftext,label", *lines, ""]), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.csv", "a.jsonl", "a.json", "a.parquet"):
        assert read_rows(tmp_path / name) == ROWS, name


def test_a_tab_separated_file_has_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"open\t1\r\n')
    assert read_rows(tmp_path / "a.tsv") == [{"text": '"open', "label": "1"}]


def test_datasets_of_the_hub_are_read(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "saved" / "train"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    assert read_rows(folder) == ROWS
    datasets.load_from_disk(folder).map(lambda row: {"text": row["text"].lower()})  # leaves a cache file
    assert list(folder.glob("cache-*.arrow"))
    assert read_rows(folder) == ROWS
    (folder / "data-00000-of-00001.arrow").write_bytes(b"damaged" * 9)
    with pytest.raises(UsageError, match=r"data-00000-of-00001\.arrow: can't be read as Arrow's stream"):
        read_rows(folder)
    with pytest.raises(UsageError, match=r"holds neither .*: give a split, for example .*saved/train"):
        read_rows(tmp_path / "saved")
    table = pyarrow.Table.from_arrays([["one"], ["two"]], names=["text", "text"])
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match=r"data-00000-of-00001\.arrow: names column 'text' twice"):
        read_rows(folder)


def test_splits_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    """Files named as by the Hub, data/train-00000-of-00002.parquet beside data/test-…; parts of a split are joined."""
    table = pyarrow.Table.from_pylist(ROWS)
    for part in range(2):
        pyarrow.parquet.write_table(table, tmp_path / f"train-{part:05d}-of-00002.parquet")
    assert read_rows(tmp_path) == 2 * ROWS
    pyarrow.parquet.write_table(table, tmp_path / "test-00000-of-00001.parquet")
    with pytest.raises(UsageError, match=r"holds files of several splits \(test, train\), which would be read as one"):
        read_rows(tmp_path)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"text,label\n1,2,3\n", "line 2: has 3 fields, but the first line names 2"),
    ("a.csv", b"text,label,text\n1,2,3\n", "line 1: names column 'text' twice"),
    ("a.tsv", b'text\tlabel\n"a\tb"\t1\n', "line 2: has 3 fields.*: tabs separate fields within quotes"),
    ("a.csv", b"text,label\n", "has no rows"),
    ("a.csv", b"", "has no rows"),
    ("a.csv", b'text,label\n"open,1\n', "line 2: unexpected end of data"),
    ("a.csv", b"text,label\n\xff,1\n", "line 2: not UTF-8 at byte 11"),
    ("a.csv", "text,label\na,1\nß,1\n".encode("latin-1"), "line 3: not UTF-8"),
    ("a.csv", "text,label\na,1\n".encode("utf-16"), "line 1: not UTF-8"),
    ("a.csv", b"text,label,,\n1,2,,\n", "line 1: has columns without a name"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', r"line 2: \\ud83d is half of a character"),
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', "line 1: no JSON: the key 'text' is there twice"),
    ("a.jsonl", b'{"text": 1}\n{"text"\n', "line 2: no JSON"),
    ("a.jsonl", b"3\n", "row 1: is no JSON object"),
    ("a.parquet", b"PAR2", "can't be read as parquet"),
    ("a.xlsx", b"", r"not a file of a known kind: give \.csv"),
])  # fmt: skip
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_rows(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_missing_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl: there is no such file: give one with examples"):
        read_rows(tmp_path / "none.jsonl")


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no column 'sentence', which task.text names; there are: text, label"):
        require_columns("a.csv", ROWS, {"task.text": "sentence"})
    with pytest.raises(UsageError, match=r"there are: text, ' label', '': name one of these"):
        require_columns("a.csv", [{"text": "a", " label": "b", "": "c"}], {"task.label": "label"})
    with pytest.raises(UsageError, match=r"there are: text;label: its fields seem to be separated by ';'"):
        require_columns("a.csv", [{"text;label": "a;b"}], {"task.label": "label"})


def test_an_escaped_character_of_two_halves_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude00"}\n')
    assert read_rows(tmp_path / "a.jsonl") == [{"text": "\U0001f600"}]


def test_labels_hold_spaces_and_a_row_may_lack_one_in_the_file_s_other_lines(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_bytes(b'\xef\xbb\xbf,text,label\r\n0,a,very good\r\n1,"b\r\nc",not bad \r\n')
    labels = read_labels(TaskConfig(train=str(tmp_path / "a.CSV")))
    assert labels == ["not bad", "very good"]
    assert read_rows(tmp_path / "a.CSV")[1] == {"": "1", "text": "b\r\nc", "label": "not bad "}
    (tmp_path / "b.jsonl").write_text('{"text":"a","label":"x"}\n{"text":"b","label":"y"}\n{"text":"c"}\n')
    assert read_labels(TaskConfig(train=str(tmp_path / "b.jsonl"))) == ["x", "y"]
