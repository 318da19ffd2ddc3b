"""What people see on narrow terminals and in encodings that lack characters."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from megatfm.config import load_config, to_toml
from megatfm.terminal import print_table, spell_unencodable

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "40", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which has a name in characters that ASCII lacks."""
    folder = tmp_path_factory.mktemp("terminal")
    for name, steps in (("a-name-longer-than-half-a-terminal", 10), ("数据", 20)):
        (folder / "runs" / name).mkdir(parents=True)
        config = load_config(
            "quickstart", [f"train.steps={steps}", "lr_schedule.warmup_steps=5", "model.vocab_size=400"]
        )
        (folder / "runs" / name / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--help"], 0, "corpora -> tokenizer"),
        (["verify", "--help"], 0, "NAME,..."),
        (["compare", "runs/a-name-longer-than-half-a-terminal", "runs/数据"], 2, "must be UTF-8"),
        (["compare", *["runs/a-name-longer-than-half-a-terminal"] * 2], 0, "MFU\n  a-name"),
        (["status"], 0, "run: a-name-longer-than-half-a-terminal\n  state: ENDED"),
        (["report", "runs/数据"], 2, "must be UTF-8"),
        (["config", "show", "…"], 2, "…: no such config file or preset"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_no_command_fails_for_what_a_terminal_lacks(
    folder: Path, words: list[str], code: int, message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatfm", *words],
        cwd=folder, env={**os.environ, **PLAIN}, capture_output=True, check=False,
    )  # fmt: skip
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert message in text


def test_characters_are_spelled_and_names_of_files_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("ascii", b"2 x 3 -> ? \xe6"), ("utf-8", "2 × 3 → 数 ".encode() + b"\xe6")):
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding, errors="strict"))
        spell_unencodable()
        print("2 × 3 → 数 \udce6", end="", flush=True)
        assert output.getvalue() == expected


@pytest.mark.parametrize("width", [20, 38, 42, 80])
def test_a_table_is_a_list_where_it_would_be_cut(width: int) -> None:
    cells = [["first", "1,234,567", "of many words"], ["a second row", "", "[x] is no markup"]]
    table = Table("", "a number", "text", title="A table", box=None, pad_edge=False)
    for row in cells:
        table.add_row(*row)
    output = io.StringIO()
    print_table(
        table, Console(file=output, width=width, force_terminal=True, color_system=None, markup=False)
    )
    text = output.getvalue()
    longest = 12 + 1 + 9 + 1 + 16  # of each column, and a space between
    assert all(cell in text for row in cells for cell in row), text
    assert ("  a number: 1,234,567\n" in text) == (width < longest), text
