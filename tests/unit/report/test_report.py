"""The report of a run: its contents, compared runs, and the command that resumes it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from megatfm.errors import MegatfmError, UsageError
from megatfm.report import write_report
from megatfm.report.page import format_subtitle, make_resume_command
from megatfm.report.run import Run
from megatfm.terminal import format_counted
from tests.support.files import write_lines
from tests.support.forked_commands import run_command
from tests.support.small_runs import Page, replace_metrics, report_page, write_reported_run


def test_a_finished_run_shows_everything(run: Path) -> None:
    page = report_page(run)
    assert [label.split(",")[0] for label in page.charts()] == [
        "Loss", "Bits per byte", "Gradient norm", "Learning rate", "Speed", "Waiting for data", "Memory",
    ]  # fmt: skip
    for text in (
        "finished · 1,000 steps", "decoder · 4 layers · 256 wide", "16.4 M", "xz -9, joined: 1.93", "1,480",
        "layers.*.attn.wo            row", "SIGUSR1: saved, exit 75", "2026-11-21", "2.13.0+cpu", "31 same text",
        "190 files were left out by their names", f"megatfm launch {run} --nproc 2",
    ):  # fmt: skip
        assert text in page.text, text
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["evaluation"]["stdlib"]
    assert f"{last['bits_per_byte']:.3f}" in page.text
    assert f"stdlib: 4.462 at step 100, {last['loss']:.4g} at step 1,000" in page.charts()[0]


def test_files_and_text_are_in_powers_of_ten_as_on_the_page_of_a_corpus(run: Path) -> None:
    text = report_page(run).text
    assert "10.9 MB" in text, "text of 3,402,118 tokens"
    assert "12.9 MB" in text, "text that was read"
    assert "1.24 GiB" in text, "memory"


def test_the_page_has_no_external_references(run: Path) -> None:
    page = report_page(run)
    html = (run / "report.html").read_text()
    assert page.count("script") == page.count("style") == 1
    for _, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "srcset", "data", "action"):
                assert str(value).startswith(("#", "data:")), (name, value)
    assert "url(" not in html
    assert "@import" not in html


def test_untrusted_texts_are_escaped(run: Path) -> None:
    evil = "</pre></script><script>alert('x')</script><img src=x onerror=alert(1)> \" onload=\"alert(2)"
    (run / "samples.jsonl").write_text(json.dumps({"prompt": evil, "text": evil, "step": evil}) + "\n")
    (run / "events.jsonl").write_text(json.dumps({"time": evil, "event": evil, "detail": evil}) + "\n")
    (run / "plan.txt").write_text(evil)
    (run / "environment.json").write_text(json.dumps({evil: evil}))
    (run / "baselines.json").write_text(json.dumps({evil: {evil: 2.0}}))
    replace_metrics(run, [{"step": 1, "loss": 2.0, "evaluation": {evil: {"loss": 2.0, "bits_per_byte": 1.0}}}])
    page = report_page(run)
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count(evil) >= 8


def test_a_run_without_a_step_has_a_page(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", "plan.txt", "environment.json", "baselines.json"):
        (run / name).unlink()
    page = report_page(run)
    assert page.charts() == []
    assert "no step yet" in page.text
    assert "No step has been recorded yet." in page.text
    assert f"megatfm train {run}" in page.text


def test_an_unfinished_run_has_a_page(run: Path) -> None:
    replace_metrics(run, [{"step": 1, "loss": 8.5, "lr": 1e-4}, {"step": 2, "loss": 8.25, "grad_norm": 1.5}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"los')
    page = report_page(run)
    assert [label.split(",")[0] for label in page.charts()] == ["Loss", "Gradient norm", "Learning rate"]
    assert "step 2 of 1,000" in page.text
    assert "metrics.jsonl: 1 line(s) left out that can't be read" in page.text


CHARTS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "validation sets": (
        [{"evaluation": {"code": {"loss": 2.0, "bits_per_byte": 1.0}, "prose": {"loss": 3.0, "bits_per_byte": 1.5}}}],
        ["Loss, .*code: 2 at step 1, 2 at step 1; prose: 3 at step 1", "Bits per byte, code", "Bits per byte, prose"],
    ),
    "positions": (
        [{"evaluation": {"code": {"loss": 2.0, "loss_by_position": [3.0, 2.0, "NaN"]}, "prose": {"loss": 3.0}}}],
        [r"Loss by position in the row, nats per token, code\. tokens 1 to 171: 3 at step 1, 3 at step 1; "
         "tokens 172 to 342: 2 at step 1, 2 at step 1$"],
    ),
    "corpora": (
        [{"loss_by_source": {"web": 3.0, "Bücher": 2.0}}, {"loss_by_source": {"web": 1.0}}],
        [r"Training loss by source, nats per token\. web: 3 at step 1, .*; Bücher: 2 at step 1, 2 at step 1$"],
    ),
    "all pairs and visible ones": (
        [{"mfu": 0.42, "mfu_causal": 0.4}] * 3,
        ["Utilization.*with all of attention: 42 at step 1.*without its masked half: 40 at step 1"],
    ),
    "all pairs, which are visible": (
        [{"mfu": 0.42, "mfu_causal": 0.42}] * 3,
        ["Utilization.*with all of attention: 42 at step 1, 42 at step 3$"],
    ),
}  # fmt: skip
"""By what charts have a line for: records of steps, and what the page says of its charts."""


@pytest.mark.parametrize(("records", "charts"), CHARTS.values(), ids=CHARTS)
def test_a_chart_has_a_line_for_each(run: Path, records: list[dict[str, Any]], charts: list[str]) -> None:
    replace_metrics(run, [{"step": step, "loss": 8.5, **record} for step, record in enumerate(records, 1)])
    page = report_page(run)
    displayed = "\n".join([*page.charts(), page.text])
    assert all(re.search(chart, displayed, re.MULTILINE) for chart in charts), page.charts()


def test_samples_of_evaluations_and_of_generate_are_merged(run: Path) -> None:
    """Samples are grouped by prompt, in the order of steps."""
    texts = {10: [{"prompt": "a", "text": "NaN"}], 20: [{"prompt": "b", "text": ""}, {"prompt": "a", "text": "<b>"}]}
    texts[20].append("torn")  # type: ignore[arg-type]
    replace_metrics(run, [{"step": step, "loss": 2.0, "samples": samples} for step, samples in texts.items()])
    samples = [{"prompt": "b", "text": " of 15", "step": 15}, {"prompt": "a", "text": " of 15", "step": 15}]
    write_lines(run / "samples.jsonl", samples)
    report_page(run)
    html = (run / "report.html").read_text()
    texts_in_order = ("<b>a</b>NaN", "<b>a</b> of 15", "<b>a</b>&lt;b&gt;", "<b>b</b> of 15", "<b>b</b><")
    places = [html.index(text) for text in texts_in_order]
    assert places == sorted(places)


def test_losses_that_are_not_finite_are_counted(run: Path) -> None:
    losses = [3.0, "NaN", 2.0, "Infinity", 1.0]
    replace_metrics(run, [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
    assert "2 not finite" in report_page(run).text


def test_a_metric_without_a_finite_value_is_named(run: Path) -> None:
    records = [{"step": step, "loss": "NaN", "grad_norm": "Infinity", "lr": 0.1} for step in (1, 2)]
    replace_metrics(run, records)
    page = report_page(run)
    assert "not shown, since no value is finite: loss, grad_norm" in page.text
    assert [chart.partition(",")[0] for chart in page.charts()] == ["Learning rate"]
    replace_metrics(run, [{**record, "norms": dict.fromkeys("abcdef", "NaN")} for record in records])
    assert "loss, grad_norm, norms.a, norms.b, norms.c, norms.d and 2 more" in report_page(run).text


def test_a_long_history_is_cut(run: Path) -> None:
    events = [{"event": "skipped", "step": step, "detail": ""} for step in range(1000, 1300)]
    write_lines(run / "events.jsonl", events)
    text = " ".join(report_page(run).text.split())
    assert "100 earlier events are in events.jsonl skipped at step 1,100 skipped" in text
    assert text.count("skipped at step") == 200


def test_a_long_run_makes_a_page_of_bounded_size(run: Path) -> None:
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 40_001):
            loss = 99 if step == 23_456 else 2 + 1 / step
            file.write(f'{{"step":{step},"loss":{loss},"lr":{1 / step},"grad_norm":1}}\n')
    page = report_page(run)
    assert (run / "report.html").stat().st_size < 250_000
    raw = page.lines("raw")
    assert all(len(line["values"]) <= 1500 for line in raw)
    assert 99 in raw[0]["values"], "the spike is drawn"


def test_all_sources_of_a_mixture_are_listed_also_remote_ones(run: Path) -> None:
    corpora, files = run.parents[1] / "corpora", fsspec.filesystem("memory")
    for name in ("train/manifest.json", "prep.json"):
        files.pipe(f"/shelf/web/{name}", (corpora / name).read_bytes().replace(b"1480", b"1481"))
    text = (run / "config.toml").read_text()
    mixture = f"""[data.mixture]
books = {{ path = "{corpora}/train", weight = 1.0 }}
web = {{ path = "memory://shelf/web/train", weight = 2.0 }}
gone = {{ path = "memory://shelf/gone/train", weight = 1.0 }}
"""
    (run / "config.toml").write_text(text.replace(f'train = "{corpora}/train"\n', "") + mixture)
    page = report_page(run)
    assert all(f"How {name} was prepared" in page.text for name in ("books", "web"))
    assert "How gone was prepared" not in page.text
    assert page.text.count("190 files were left out by their names") == 2
    assert all(words in page.text for words in ("1,480", "1,481", "memory://shelf/gone/train"))
    assert "no such folder" not in page.text
    files.rm("/shelf", recursive=True)


def test_a_corpus_that_moved_is_noted(run: Path) -> None:
    (run.parents[1] / "corpora" / "train" / "manifest.json").unlink()
    page = report_page(run)
    assert "has no manifest.json" in page.text
    assert "248,310" in page.text


def test_events_are_marked_at_their_steps(run: Path) -> None:
    events = [
        {"event": "skipped", "step": 480, "detail": "gradient norm nan"},
        {"event": "rolled back", "step": 700, "detail": "loss 9"},
        {"event": "failed", "step": 0, "detail": "before the first step"},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    page = report_page(run)
    expected = [[510, "stopped"], [510, "resumed"], [480, "skipped"], [700, "rolled back"]]
    for chart in page.data():
        assert [event[:2] for event in chart["events"]] == expected
    assert page.data()[0]["events"][3] == [700, "rolled back", "loss 9"]
    classes = [str(attributes.get("class")) for tag, attributes in page.tags if tag == "li"]
    assert sum(name.startswith("mark ") for name in classes) == 4, "the first chart explains the lines of all"


def test_compared_runs_are_drawn_behind_under_their_names(run: Path, tmp_path: Path) -> None:
    slower_run = tmp_path / "runs" / "slower"
    write_reported_run(tmp_path / "b", 100).rename(slower_run)
    assert run_command("report", str(run), "--with", str(slower_run)) == 0
    page = Page(run / "report.html")
    lines = page.lines("other")
    assert [line["name"] for line in lines] == ["slower", "slower, stdlib", "slower, stdlib", *["slower"] * 3]
    assert all(line["run"] == 1 and sum(line["steps"]) == 100 for line in lines)
    assert len(json.loads(next(str(a["data-axes"]) for tag, a in page.tags if tag == "main"))) == 2
    with pytest.raises(UsageError, match="not a run directory"):
        write_report(run, [tmp_path])


def test_the_report_of_a_folder_that_is_not_ours_goes_elsewhere(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run_command("report", str(run), "--out", str(page)) == 0
    assert "synthetic" in page.read_text(encoding="utf-8")
    assert not (run / "report.html").exists()
    (run / "report.html").mkdir()  # root may write where permissions forbid it
    with pytest.raises(MegatfmError, match=r"html: Is a directory: choose another file with --out, in a folder"):
        write_report(run)


def test_a_compared_run_that_is_given_twice_is_drawn_once(run: Path, tmp_path: Path) -> None:
    """Otherwise, lines of later runs would have the axes of an earlier one."""
    slower, faster = (write_reported_run(tmp_path / name, 20) for name in ("slower", "faster"))
    write_report(run, [slower, slower, tmp_path / "slower" / ".." / "slower" / "runs" / "synthetic", faster])
    page = Page(run / "report.html")
    assert {line["run"] for line in page.lines("other")} == {1, 2}
    assert len(json.loads(next(str(a["data-axes"]) for tag, a in page.tags if tag == "main"))) == 3


def test_the_parts_of_the_time_are_shown(run: Path) -> None:
    parts = {"data": 0.1, "passes": 0.6, "optimizer": 0.2, "other": 0.1}
    lines = [{"step": n, "loss": 2.0, "step_seconds": 1.0, "step_parts": parts} for n in range(1, 9)]
    replace_metrics(run, [*lines, {**lines[0], "step": 9, "evaluation_seconds": 0.5, "save_seconds": 0.5}])
    page = report_page(run)
    bar = next(a for tag, a in page.tags if a.get("class") == "bar")
    assert bar["aria-label"] == (
        "forward and backward 54.0 %; optimizer 18.0 %; waiting for data 9.0 %; checks and the like 9.0 %; "
        "evaluation 5.0 %; saving 5.0 %"
    )
    (words,) = (label for label in page.charts() if label.startswith("Where a step's time goes"))
    assert "forward and backward: 60 at step 1, 60 at step 9; optimizer: 20 at step 1" in words


def test_the_page_has_tokens_and_hours_of_its_steps(run: Path) -> None:
    (axes,) = json.loads(next(str(a["data-axes"]) for tag, a in report_page(run).tags if tag == "main"))
    steps, tokens, hours = axes
    assert (steps[0], steps[-1], tokens[-1]) == (0, 1000, 1000 * 32 * 512)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert hours[-1] == pytest.approx(sum(json.loads(line)["step_seconds"] for line in lines) / 3600, abs=1e-5)
    assert 400 <= len(steps) <= 1001


def test_settings_that_differ_from_the_defaults_are_shown_first(run: Path) -> None:
    page = report_page(run)
    first, _, _ = page.text.partition("All settings")
    config = first.partition("What differs from the defaults:")[2]
    assert "d_ff" in config
    assert "sequence_parallel" not in config
    assert "muon" in config, "a section that differs keeps its name"
    config_file = Path(run / "config.toml")
    config_file.write_text(config_file.read_text() + "[unknown]\nkey = 3\n")
    page = report_page(run)
    assert "What differs" not in page.text, "of a config that this version can't read, all is shown"
    assert "unknown" in page.text


def test_the_shares_of_a_mixture_are_drawn_over_the_steps(run: Path) -> None:
    config = (run / "config.toml").read_text()
    train = re.search(r'train = "(.*)"', config)
    assert train
    sources = ", ".join(f'{name} = {{ path = "{train[1]}", weight = {n} }}' for name, n in (("code", 3), ("prose", 1)))
    mixture = f"mixture = {{ {sources} }}"
    later = f"mixture_schedule = [{{ tokens = {500 * 32 * 512}, weights = {{ code = 1, prose = 1 }} }}]"
    (run / "config.toml").write_text(config.replace(train[0], f"{mixture}\n{later}"))
    (words,) = (chart for chart in report_page(run).charts() if chart.startswith("Mixture"))
    assert words.endswith("code: 75 at step 1, 50 at step 1,000; prose: 25 at step 1, 50 at step 1,000")


def test_mfu_is_shown_by_both_conventions(run: Path) -> None:
    """The page has what utilization is measured against."""
    (run / "environment.json").write_text(json.dumps({"peak": "989 TFLOP/s per device (H200: data sheet)"}))
    replace_metrics(run, [{"step": n, "loss": 2.0, "mfu": 0.42, "mfu_causal": 0.4} for n in (1, 2, 3)])
    page = report_page(run)
    assert "42 %" in page.text
    assert "40 % without masked attention" in page.text
    assert "% of 989 TFLOP/s per device (H200: data sheet)" in page.text


@pytest.mark.parametrize(("environment", "command"), [
    ({}, "megatfm launch runs/x --nproc 8"),
    ({"processes": "1", "machines": "1", "launcher": "none"}, "megatfm train runs/x"),
    ({"processes": "4", "machines": "1", "launcher": "torchrun"}, "megatfm launch runs/x --nproc 4"),
    ({"processes": "32", "machines": "4", "launcher": "torchrun"},
     "torchrun --nnodes 4 --nproc-per-node 8 … -m megatfm train runs/x"),
    ({"processes": "32", "machines": "4", "launcher": "srun", "gpu": "H100"},
     "megatfm launch runs/x --slurm --nodes 4 --gpus-per-node 8"),
    ({"processes": "2", "machines": "2", "launcher": "srun", "gpu": "none"},
     "megatfm launch runs/x --slurm --nodes 2 --nproc 1"),
    ({"processes": "6", "machines": "3", "launcher": "mpirun"}, "mpirun -n 6 megatfm train runs/x"),
    ({"processes": 6, "machines": "x" * 20}, "megatfm launch runs/x --nproc 8"),
])  # fmt: skip
def test_the_resume_command_asks_for_as_many_processes(environment: dict[str, object], command: str) -> None:
    plan = "mesh  dp_replicate 1 × dp_shard 4 × tp 2 × ep 4\n\nmodules 7"
    run: Any = SimpleNamespace(folder=Path("runs/x"), plan=plan, environment=environment)
    assert make_resume_command(run) == command


def test_one_of_a_kind_is_named_in_the_singular() -> None:
    """The line below a report's title, for a model of one layer and of two, and counts in general."""
    counts = [format_counted(count, "class", "classes") for count in (0, 1, 2, 1000)]
    assert counts == ["0 classes", "1 class", "2 classes", "1,000 classes"]
    assert format_counted(1, "shard") + ", " + format_counted(2, "shard") == "1 shard, 2 shards"


@pytest.mark.parametrize(("n_layers", "layers"), [(1, "1 layer"), (2, "2 layers")])
def test_a_subtitle_counts_layers(run: Path, n_layers: int, layers: str) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub(r"(?m)^n_layers = .*", f"n_layers = {n_layers}", text))
    assert f" · {layers} · " in format_subtitle(Run(run))
