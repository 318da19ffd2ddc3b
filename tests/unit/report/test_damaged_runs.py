"""The report of a run whose files are damaged or can't be written."""

import json
import math
import os
from pathlib import Path

import pytest

from megatfm.errors import MegatfmError, UsageError
from megatfm.report import write_report
from megatfm.report.compare import RunComparison
from tests.support.reported_runs import report_page


def test_damaged_side_files_are_notes_not_failures(run: Path) -> None:
    (run / "environment.json").write_text("{")
    (run / "baselines.json").write_text("[]")
    (run / "events.jsonl").write_text("7\n")
    page = report_page(run)
    for name in ("environment.json", "baselines.json", "events.jsonl"):
        assert name in page.text
    assert len(page.charts()) == 7


@pytest.mark.parametrize(("name", "content", "note"), [
    ("metrics.jsonl", {"step": 10**30, "loss": 1.0}, "metrics.jsonl: 1 line(s) left out that have no valid step"),
    ("metrics.jsonl", {"step": "7", "loss": 1.0}, "metrics.jsonl: 1 line(s) left out that have no valid step"),
    ("metrics.jsonl", {"step": 1, "loss": 10**400}, "step 1 of 1,000"),
    ("metrics.jsonl", {"step": 1, "loss": 1.0, "tasks": 5, "terms": [1], "loss_by_source": 2}, "step 1 of 1,000"),
    ("metrics.jsonl", {"step": 1, "loss": 1.0, "norms": {"layer": {"load": {"x": 1}}}}, "step 1 of 1,000"),
    ("events.jsonl", {"time": 1e300, "event": "stopped"}, "stopped"),
    ("events.jsonl", {"time": math.inf, "event": "stopped"}, "stopped"),
    ("baselines.json", {"stdlib": {"gzip": "a third", "xz": None, "zstd": 10**400, "bz2": 2.5}}, "bz2: 2.50"),
    ("../../corpora/prep.json", {"steps": [{"step": "read"}]}, "prep.json of train is not shown"),
    ("../../corpora/prep.json", {"steps": [], "notes": 7}, "prep.json of train is not shown"),
    ("config.toml", "train = 3", "finished"),
    ("config.toml", '[train]\nsteps = "many"', "finished"),
    ("config.toml", "data = [3]", "Corpus"),
    ("config.toml", 'objective = "causal"', "nats per token"),
    ("config.toml", '[data]\ntrain = "pipe:cat corpus"', "a corpus has no commands to run"),
    ("config.toml", '[data.mixture]\ncode = { path = "a", weight = 0 }', "the mixture's weights are not shown"),
    ("config.toml", '[data.mixture]\ncode = { path = "a" }', "the mixture's weights are not shown"),
])  # fmt: skip
def test_impossible_values_do_not_stop_the_report(run: Path, name: str, content: object, note: str) -> None:
    (run / name).write_text(f"{content if name == 'config.toml' else json.dumps(content)}\n")
    assert note in report_page(run).text


def test_settings_of_another_type_stop_neither_report_nor_comparison(run: Path) -> None:
    record = {"step": 1, "mfu": 0.5, "evaluation": {"stdlib": {"loss": 1.0, "loss_by_position": [1.0, 2.0]}}}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "config.toml").write_text('[data]\nsequence_length = "long"\n')
    (run / "environment.json").write_text('{"peak": ["H100"]}')
    assert "Held-out loss" in report_page(run).text
    assert RunComparison.read([run, run]).collect_results().rows[0][-3] == "50 %"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a run directory \(it has no config.toml\)"):
        write_report(tmp_path)


def test_a_broken_config_is_one_line(run: Path) -> None:
    (run / "config.toml").write_text("name = \n")
    with pytest.raises(MegatfmError, match=r"config.toml: can't read the run's config") as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(run)
    old = (run / "report.html").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MegatfmError, match=r"report.html: No space left on device"):
        write_report(run)
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob(".*"))
