"""Labelled files: what they hold is read as it is, and what is wrong is named."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatfm.errors import UsageError
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

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved" / "train")
    assert read_rows(tmp_path / "saved" / "train") == ROWS
    with pytest.raises(UsageError, match=r"holds neither .*: give a split, for example .*saved/train"):
        read_rows(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label\n1,2,3\n", "line 2: has 3 fields, but the first line names 2"),
        ("a.csv", b"text,label,text\n1,2,3\n", "line 1: names column 'text' twice"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.csv", b"", "has no rows"),
        ("a.csv", b'text,label\n"open,1\n', "line 2: unexpected end of data"),
        ("a.csv", b"text,label\n\xff,1\n", "not UTF-8 at byte 11"),
        ("a.jsonl", b'{"text": 1}\n{"text"\n', "line 2: no JSON"),
        ("a.jsonl", b"3\n", "row 1: is no JSON object"),
        ("a.parquet", b"PAR2", "can't be read as parquet"),
        ("a.xlsx", b"", r"not a file of a known kind: give \.csv"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_rows(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(
        UsageError, match=r"no column 'sentence', which task.text names; there are: text, label"
    ):
        require_columns("a.csv", ROWS, {"task.text": "sentence"})
