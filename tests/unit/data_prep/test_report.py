"""The corpus report, whose numbers are those of the shards, and progress: a bar on a terminal, plain lines in a log."""

import copy
import io
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from megatfm import data_prep, tokenizers
from megatfm.config.prep import PrepConfig, TokenizerConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import MAX_VALUES
from megatfm.data_prep.documents import TokenizedDocument
from megatfm.data_prep.execution import progress
from megatfm.data_prep.execution.executors import LocalExecutor
from megatfm.data_prep.execution.progress import PrepSummary, Reporter
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.report import format_count, make_bars, render_report
from megatfm.data_prep.shards import SplitStatistics
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from megatfm.terminal import format_file_size
from tests.support.prep_files import write_file

Make = Callable[..., PrepConfig]


def test_the_statistics_are_those_of_the_shards(config: Make) -> None:
    summary = data_prep.run(config(steps=[{"name": "language"}]))
    made_with = tokenizers.load(summary.out)
    for name in ("train", "validation"):
        corpus, result = Corpus.open(summary.out / name), summary.result[name]
        ids = [np.asarray(sample.tokens) for sample in map(corpus.read_sample, range(corpus.n_samples))]
        uses = Counter(np.concatenate(ids).tolist())
        assert result["vocabulary"]["used"] == len(uses)
        assert result["vocabulary"]["used_100_times"] == sum(count >= 100 for count in uses.values())
        assert result["vocabulary"]["size"] == made_with.vocab_size
        assert [times for _, times in result["vocabulary"]["common"]] == [times for _, times in uses.most_common(12)]
        lengths = Counter(2 ** int(np.ceil(np.log2(max(1, len(item))))) for item in ids)
        assert dict(result["lengths"]) == lengths
        assert sum(documents for _, documents, _, _ in result["sources"]) <= corpus.n_samples
        if not result["more_sources"]:
            assert sum(tokens for *_, tokens in result["sources"]) == corpus.n_tokens


def test_lengths_and_sources_by_hand(tmp_path: Path) -> None:
    config = TokenizerConfig(kind="byte-bpe", vocab_size=270, sentinels=2, ul2_modes=False)
    statistics = SplitStatistics(write_tokenizer(tmp_path, make_tokenizer_files(config, ["some text " * 50])))
    lengths = zip("aabbb", (1, 2, 4, 5, 8), strict=True)
    documents = [TokenizedDocument(f"{name}/{tokens}", tokens, 10 * tokens) for name, tokens in lengths]
    statistics.add(np.zeros(20, np.int32), documents)
    facts = statistics.as_json()
    assert facts["lengths"] == [[1, 1], [2, 1], [4, 1], [8, 2]]
    assert facts["sources"] == [["b", 3, 170, 17], ["a", 2, 30, 3]]
    assert facts["vocabulary"]["used"] == 1


def test_fields_are_counted_up_to_a_number() -> None:
    """Records of a hostile file may each have a field of their own (`read.metadata_keys = ["*"]`)."""
    statistics, no_ids = SplitStatistics(None), np.empty(0, np.int32)
    for n in range(MAX_VALUES + 10):
        statistics.add(no_ids, [TokenizedDocument("a", 0, 1, fields={f"field {n}": "x", "field 0": "x"})])
    fields = statistics.as_json()["fields"]
    assert len(fields) == MAX_VALUES
    assert fields["field 0"] == [["x", MAX_VALUES + 10, MAX_VALUES + 10, 0]]
    named = SplitStatistics(None)
    named.add(
        no_ids, [TokenizedDocument("a", 0, 1, domain="b.org", fields={"domain": "law", "url": "https://b.org/c"})]
    )
    assert (named.as_json()["domains"], named.as_json()["fields"]) == (
        [["b.org", 1, 1, 0]],
        {"domain": [["law", 1, 1, 0]]},
    )


def test_the_page_is_whole_and_harmless(config: Make, changeable_corpus: Path) -> None:
    for name in ("<script>alert(1)</script>.txt", "again.txt"):
        write_file(changeable_corpus / name, b"<script>alert(2)</script> is empty? \n")
    summary = data_prep.run(config(read={"folder": str(changeable_corpus)}))
    page = (summary.out / "report.html").read_text()
    assert page == render_report(summary.result)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page
    check = _Balanced()
    check.feed(page)
    assert check.open == []
    for step in summary.result["steps"]:
        assert step["step"] in page
        for reason, dropped in step["dropped"].items():
            assert f"<summary>{reason} <small>{dropped['documents']:,} document" in page


def test_a_result_of_an_older_version_has_a_page(prepared: PrepSummary) -> None:
    result = copy.deepcopy(prepared.result)
    for name in ("train", "validation"):
        for key in ("lengths", "sources", "more_sources", "vocabulary"):
            del result[name][key]
    assert "Training split" in render_report(result)


def test_a_field_has_a_chart_of_its_own_whatever_its_name(prepared: PrepSummary) -> None:
    """Also a field that only one split has, or that is named like another chart."""
    result = copy.deepcopy(prepared.result)
    result["train"]["fields"] = {name: [[f"value of {name}", 1, 2, 3]] for name in ("lengths", "sources", "grade")}
    page, plain = render_report(result), render_report(prepared.result)
    assert all(f"value of {name}" in page for name in result["train"]["fields"])
    assert page.count("<h3>") == plain.count("<h3>") + 3
    for name, *_ in prepared.result["train"]["sources"]:
        assert name in page


def test_report_formats_numbers_and_bars() -> None:
    assert [format_count(value) for value in (0, 12_345, 3_214_000, 2e9)] == ["0", "12,345", "3.21 M", "2 B"]
    sizes = [12, 999, 12_345, 999_400, 3_214_000, 999_999_999]
    assert [format_file_size(size) for size in sizes] == ["12 B", "999 B", "12.3 KB", "999 KB", "3.21 MB", "1 GB"]
    assert [bar.percent for bar in make_bars([("a", 5), ("b", 20)])] == [25.0, 100.0]
    assert make_bars([("a", 0)])[0].percent == 0


class _Balanced(HTMLParser):
    """Elements that were opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def clock(*times: float) -> SimpleNamespace:
    seconds = iter(times)
    return SimpleNamespace(monotonic=lambda: next(seconds), strftime=lambda _: "12:01:07")


def test_a_log_gets_lines_with_time_task_speed_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    times = (0.0, 0.0, *[700.0] * 2, *[7400.0] * 2, *[7500.0] * 2, 7512.5)
    for unit, total, lines in (
        ("bytes", 2 * 10**9, (
            "clean | 10 %: 200 MB of 2 GB, 286 KB/s, 1 h 45 min left",
            "clean | 90 %: 1.8 GB of 2 GB, 243 KB/s, 13 min 42 s left",
            "clean | 100 %: 2 GB of 2 GB, 267 KB/s",
        )),
        ("rows", 2 * 10**6, (
            "clean | 10 %: 200,000 of 2,000,000 rows, 285/s, 1 h 45 min left",
            "clean | 90 %: 1,800,000 of 2,000,000 rows, 243/s, 13 min 42 s left",
            "clean | 100 %: 2,000,000 of 2,000,000 rows, 266/s",
        )),
    ):  # fmt: skip
        monkeypatch.setattr(progress, "time", clock(*times))
        log = io.StringIO()
        with Reporter(Console(file=log), (3, 8)).stage("clean", total, unit) as advance:
            for percent in (10, 80, 10):
                advance(total * percent // 100)
        expected = [*lines, "clean | done in 7512.5 s"]
        assert log.getvalue().splitlines() == [f"12:01:07 task 3/8 | {line}" for line in expected]


def test_a_stage_that_was_committed_before_is_skipped_and_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "time", clock(0.0, 0.0))
    log, committed = io.StringIO(), {"bytes": 3}
    workspace = SimpleNamespace(
        out=tmp_path, folder=tmp_path, get_folder=lambda basis: tmp_path, upload=None, read_stage=lambda *_: committed
    )
    stages = StageRunner(None, workspace, Reporter(Console(file=log)), LocalExecutor())
    assert stages.run_parts("clean", {}, 2, pytest.fail, pytest.fail, total=10) == committed
    assert log.getvalue().splitlines() == ["12:01:07 clean | skipped: committed by an earlier run"]


def test_a_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", clock(*[1.0] * 2000))
    log = io.StringIO()
    with Reporter(Console(file=log)).stage("read", 1000) as advance:
        for _ in range(1000):
            advance(1)
    assert len(log.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_bar() -> None:
    terminal = io.StringIO()
    with Reporter(Console(file=terminal, force_terminal=True, width=100)).stage("read", 200) as advance:
        advance(100)
    assert "━" in terminal.getvalue()
    assert "read | done in" in terminal.getvalue()


def test_a_failed_stage_is_not_called_done() -> None:
    log = io.StringIO()
    with pytest.raises(ValueError), Reporter(Console(file=log)).stage("read", 1):
        raise ValueError
    assert log.getvalue() == ""


def test_markup_and_long_lines_are_said_as_they_are() -> None:
    log = io.StringIO()
    line = "note: [bold]a[/bold] " + "x" * 300
    Reporter(Console(file=log, width=40)).log(line)
    assert log.getvalue()[8:] == f" {line}\n"


def test_the_table_has_each_reason_whole_on_a_line() -> None:
    reasons = {"int_not_text_as_field_content": 1_207, "near_validation_document_of_another_part": 2}
    dropped = {reason: {"documents": count} for reason, count in reasons.items()}
    step = {"step": "read", "documents_out": 10, "bytes_out": 3 * 10**12, "changed": 0, "dropped": dropped}
    split = {"documents": 1, "text_bytes": 5, "tokens": 0, "shards": 1}
    table = PrepSummary("out", {"steps": [step], "train": split, "validation": split}, False).to_table()
    wide, narrow = io.StringIO(), io.StringIO()
    Console(file=wide, width=200).print(table)
    Console(file=narrow, width=60).print(table)
    cells = [line.split("│")[-2].strip() for line in wide.getvalue().splitlines() if "│" in line]
    assert cells[:2] == ["1,207 int_not_text_as_field_content", "2 near_validation_document_of_another_part"]
    assert cells[2:] == ["1 shard", "1 shard"]
    assert "3 TB" in wide.getvalue()
    assert "…" not in narrow.getvalue()
