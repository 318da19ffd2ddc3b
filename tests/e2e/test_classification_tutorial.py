"""The page docs/tutorials/classify-texts.md, followed from its first block to a prediction over HTTP."""

import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatfm.tasks.files import read_rows
from tests.support.documentation import FENCE, ROOT
from tests.support.files import read_lines
from tests.support.forked_commands import ForkedCommand, run_megatfm

PAGE = ROOT / "docs" / "tutorials" / "classify-texts.md"
BLOCKS = FENCE.findall(PAGE.read_text(encoding="utf-8"))
LESS = {"finetune": ("task.epochs=4", "data.sequence_length=64")}
"""Fewer epochs than the page says for a model that has learnt nothing, and shorter texts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every block before the server was run, in the page's order."""
    folder = tmp_path_factory.mktemp("tutorial")
    for language, title, text in BLOCKS:
        if title:
            (folder / title).write_text(text, encoding="utf-8")
        if language == "python" and title != "serve.py":
            run = ForkedCommand([], folder / f"{title}.out", folder, program=str(folder / title))
            assert run.wait() == 0, run.output
        if language == "console":
            for line in text.splitlines():
                words = line.split()[1:]
                run_megatfm(*words, *LESS.get(words[0], ()), output=folder / "output", cwd=folder)
    return folder


def predictions(folder: Path) -> list[dict]:
    return read_lines(folder / "new.predictions.jsonl")


def test_the_model_beats_the_largest_class_on_unseen_texts(folder: Path) -> None:
    result = json.loads((folder / "runs/packages/task.json").read_text())["sets"]["test"]
    rows = read_rows(folder / "packages.test.csv")
    labels = Counter(row["package"] for row in rows)
    assert result["examples"] == len(rows) > 50
    assert result["metrics"]["accuracy"] > max(labels.values()) / len(rows) + 0.1
    assert (folder / "runs/packages/report.html").is_file()


def test_the_tables_share_no_text(folder: Path) -> None:
    train, validation, test = (
        {row["text"] for row in read_rows(folder / f"packages.{name}.csv")} for name in ("train", "validation", "test")
    )
    assert not train & test
    assert not train & validation
    assert not validation & test


def test_the_exported_model_predicts_what_the_run_predicts(folder: Path) -> None:
    label, probability = (folder / "predict.py.out").read_text().splitlines()[-1].split()
    expected = predictions(folder)[0]
    assert label == expected["label"]
    assert float(probability) == pytest.approx(expected["probabilities"][label], abs=6e-4)


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Address of the page's server, on a port that the system chooses."""
    server = ForkedCommand(["0"], folder / "serve.out", folder, program=str(folder / "serve.py"))
    try:
        while not (announcement := re.search(r"^serving on (\S+)\n", server.output, re.MULTILINE)):
            assert server.process.is_alive(), server.output
            time.sleep(0.05)
        yield announcement[1]
    finally:
        server.end()


def post(address: str, body: bytes) -> dict:
    with urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=60) as response:
        return json.load(response)


def test_the_server_answers_with_the_same_label_and_refuses_bad_requests(folder: Path, address: str) -> None:
    for row, expected in zip(read_rows(folder / "new.csv"), predictions(folder), strict=True):
        answer = post(address, json.dumps({"text": row["text"]}).encode())
        assert answer["label"] == expected["label"]
        assert answer["score"] == pytest.approx(
            expected["probabilities"][answer["label"]], abs=5e-3
        )  # the run predicts in bfloat16 where a CPU has it
    for body in (b"", b"not JSON", b"[]", b'{"text": 3}', b'{"text": " "}', b'{"other": "words"}'):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(address, body)
        assert refused.value.code == 400
        refused.value.close()
    assert post(address, '{"text": "文字 слова"}'.encode())["label"], "it goes on after refusals"
