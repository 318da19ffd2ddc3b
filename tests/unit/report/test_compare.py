"""`megatfm compare` and the report in a real browser."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from megatfm.errors import UsageError
from megatfm.report import write_report
from megatfm.report.compare import RunComparison, write_comparison
from megatfm.report.run import make_unique_names
from tests.support.files import read_lines, write_lines
from tests.support.forked_commands import run_command
from tests.support.small_runs import CHROMIUM, Page, replace_metrics, write_reported_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of one corpus, the second with another rate and shorter."""
    baseline = write_reported_run(tmp_path, 200)
    slower = tmp_path / "runs" / "slower"
    write_reported_run(tmp_path / "b", 100).rename(slower)
    config = (baseline / "config.toml").read_text().replace("lr = 3e-3", "lr = 1e-3").replace("synthetic", "slower")
    (slower / "config.toml").write_text(config)
    return [baseline, slower]


def test_compare_prints_differences(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("compare", *map(str, runs), "--out", str(tmp_path / "c.html")) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["optimizer.lr"] == ["0.003", "0.001"]
    assert lines["steps"] == ["200", "100"]
    assert not any(key.startswith(("name", "model.")) for key in lines)
    assert (tmp_path / "c.html").is_file()


def test_metrics_of_tasks_are_compared(runs: list[Path], tmp_path: Path) -> None:
    baseline, slower = runs
    path = baseline / "metrics.jsonl"
    lines = read_lines(path)
    for line in lines:
        for result in line.get("evaluation", {}).values():
            result.pop("bits_per_byte", None)
            result["metrics"] = {"accuracy": 0.75, "f1_macro": 0.5}
    write_lines(path, lines)
    config = baseline / "config.toml"
    config.write_text(config.read_text() + '\n[objective]\nname = "text_classification"\n')
    (slower / "metrics.jsonl").write_text("")
    comparison = RunComparison.read(runs)
    results = comparison.collect_results()
    set_name = comparison.runs[0].validation_sets[0]
    cells = dict(zip(results.columns, zip(*results.rows, strict=True), strict=True))
    assert cells[f"{set_name} accuracy"] == ("0.7500", "–")
    assert cells[f"{set_name} f1_macro"] == ("0.5000", "–")
    assert not any("bits/byte" in column for column in results.columns)
    titles = {(chart.title, chart.unit) for chart in comparison.make_charts()}
    assert (f"Accuracy, {set_name}", "share of held-out examples") in titles
    assert (f"Held-out loss, {set_name}", "mean over labelled examples or nats per token") in titles


def test_settings_that_differ_in_late_digits_are_shown(runs: list[Path]) -> None:
    baseline, slower = ((run / "config.toml") for run in runs)
    text = baseline.read_text()
    baseline.write_text(text.replace("lr = 3e-3", "lr = 1.230e-4").replace("clip = 1.0", "clip = 1"))
    changed = text.replace("lr = 3e-3", "lr = 1.234e-4").replace("betas = [0.9, 0.95]", "betas = [0.9, 0.950001]")
    changed = changed.replace("weight_decay = 0.1", 'weight_decay = "0.1"')
    slower.write_text(changed.replace("dp_shard = 2", "dp_shard = 2, pp = 1"))
    assert RunComparison.read(runs).list_differences() == [
        ("optimizer.lr", ["0.000123", "0.0001234"]),
        ("optimizer.betas", ["[0.9, 0.95]", "[0.9, 0.950001]"]),
        ("optimizer.weight_decay", ["0.1", "0.1"]),
        ("parallel.pp", ["–", "1"]),
    ]


def test_the_page_has_a_line_for_every_run_and_no_external_references(runs: list[Path], tmp_path: Path) -> None:
    page = Page(write_comparison(RunComparison.read(runs), tmp_path / "c.html"))
    titles = [chart.split(",")[0] for chart in page.charts()]
    assert titles == [
        "Training loss", "Held-out loss", "Bits per byte", "Gradient norm", "Learning rate", "Speed",
    ]  # fmt: skip
    for words in page.charts():
        assert "synthetic: " in words
        assert "slower: " in words
    names = [line["name"] for chart in page.data() for line in chart["lines"]]
    assert names == ["synthetic", "slower"] * 6
    assert not [a for _, a in page.tags if str(a.get("src") or a.get("href") or "#")[0] not in "#d"]


def test_mfu_relative_to_different_peaks_is_left_out(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs:
        lines = read_lines(run / "metrics.jsonl")
        (run / "metrics.jsonl").write_text("".join(json.dumps({**line, "mfu": 0.42}) + "\n" for line in lines))
    place = RunComparison.read(runs).collect_results().columns.index("MFU")

    def compare(*peaks: str) -> tuple[list[str], list[str]]:
        for run, peak in zip(runs, peaks, strict=True):
            (run / "environment.json").write_text(json.dumps({"peak": peak}))
        comparison = RunComparison.read(runs)
        return [row[place] for row in comparison.collect_results().rows], comparison.list_notes()

    assert compare("0.1 TFLOP/s", "0.1 TFLOP/s") == (["42 %", "42 %"], [])
    cells, notes = compare("0.1 TFLOP/s", "0.2 TFLOP/s")
    assert cells == ["–", "–"]
    peaks = "synthetic: 0.1 TFLOP/s; slower: 0.2 TFLOP/s"
    words = f"MFU is left out, since it is relative to different peaks: {peaks}"
    assert notes == [words]
    assert run_command("compare", *map(str, runs), "--out", str(tmp_path / "c.html")) == 0
    assert words in capsys.readouterr().out
    assert words in Page(tmp_path / "c.html").text


def test_names_of_runs_are_the_shortest_distinct_ends_of_their_paths() -> None:
    assert make_unique_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert make_unique_names([Path("/x/runs/a"), Path("/y/runs/a")]) == ["x/runs/a", "y/runs/a"]
    assert make_unique_names([Path("/r/a"), Path("/r/a")]) == ["a", "a"]


def test_a_single_run_is_refused(runs: list[Path]) -> None:
    with pytest.raises(UsageError, match="give two runs or more"):
        RunComparison.read(runs[:1])
    with pytest.raises(UsageError, match="not a run directory"):
        RunComparison.read([runs[0], runs[0].parent])


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_other_axes_without_errors(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(RunComparison.read(runs), tmp_path / "c.html")
    assert ">tokens 1M<" in draw(page, tmp_path, "#axes=tokens,log")


# ------------------------------------------------------------------------------------------ in a real browser


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_the_page_without_errors(run: Path, tmp_path: Path) -> None:
    evil = "<script>document.title = 'taken over'</script><img src='http://example.invalid/x.png'>"
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": evil, "text": evil}) + "\n")
    page = write_report(run)
    dom = draw(page, tmp_path)
    assert "<title>synthetic · megatfm report</title>" in dom
    assert "&lt;script&gt;document.title" in dom
    plots = re.split('<div class="plot', dom)[1:]
    assert len(plots) == 7
    for plot in plots:
        assert re.search(r'<path class="(smooth|line|dots) c\d" d="M[\d.]+,[\d.]+h0L', plot)
        assert '<div class="cursor"></div>' in plot


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_points_ticks_and_reference_lines_share_their_axes(run: Path, tmp_path: Path) -> None:
    """Linear and logarithmic axes, gaps, levels that share a label, and odd ranges, as the page's script draws them."""
    lines: list[dict[str, object]] = [
        {"step": 0, "loss": 4.0, "grad_norm": 0.01, "lr": 0.0, "tokens_per_second": 2.0, "memory_bytes": 2**30},
        {"step": 50, "loss": 2.0, "grad_norm": 1.0, "lr": 0.0, "tokens_per_second": "NaN", "memory_bytes": 1e38},
        {"step": 100, "loss": 1.0, "grad_norm": 100.0, "lr": 0.0, "tokens_per_second": 1.0, "memory_bytes": 1},
    ]  # fmt: skip
    lines[2]["evaluation"] = {"stdlib": {"bits_per_byte": 1.5}}
    write_lines(run / "metrics.jsonl", lines)
    (run / "baselines.json").write_text(json.dumps({"stdlib": {"a": 1.0, "b": 2.00, "c": 2.01}}))
    dom = draw(write_report(run), tmp_path)
    titles = re.findall(r'aria-label="([^",]+), ', dom)
    plots = dict(zip(titles, re.split('<div class="plot', dom)[1:], strict=True))
    for plot in plots.values():
        for x, y in points(plot, r"(?:raw|smooth|line|dots|marks)"):
            assert 0 <= x <= 1000
            assert 0 <= y <= 1000
    loss, ticks = points(plots["Loss"], "smooth"), labels(plots["Loss"], "y")
    assert [x for x, _ in loss] == [0, 500, 1000]
    assert [y for _, y in loss] == pytest.approx([10 * ticks[value] for value in ("4", "2", "1")], abs=0.1)
    assert list(labels(plots["Loss"], "x")) == ["step 0", "20", "40", "60", "80", "100"]
    norm, ticks = points(plots["Gradient norm"], "smooth"), labels(plots["Gradient norm"], "y")
    assert list(ticks) == ["0.01", "0.1", "1", "10", "100"]
    assert [y for _, y in norm] == pytest.approx([10 * ticks[value] for value in ("0.01", "1", "100")], abs=0.1)
    (speed,) = re.findall(r'<path class="smooth c1" d="([^"]+)"', plots["Speed"])
    assert speed.count("M") == 2, "a step without a number breaks the line"
    assert list(labels(plots["Bits per byte"], "level")) == ["c 2.01 · b 2", "a 1"]
    (bits,) = points(plots["Bits per byte"], "marks")
    shown = labels(plots["Bits per byte"], "level")
    assert bits[1] == pytest.approx(5 * (shown["a 1"] + shown["c 2.01 · b 2"]), abs=5)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_an_axis_ends_at_the_largest_possible_value(run: Path, tmp_path: Path) -> None:
    """Axes end at the bound where all are right, or none. Without a bound, or beyond it, values keep their room."""
    metrics = {"accuracy": 1.0, "f1_macro": 0.0, "r2": 1.0, "matthews": -1.0, "perplexity": 1.0}
    line = {"evaluation": {"v": {"loss": 1.0, "metrics": metrics}}, "mfu": 1.25}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in (1, 2)))
    dom = draw(write_report(run), tmp_path)
    plots = dict(re.findall(r'<div class="plot.*?aria-label="([^",]+), (.*?)</figure>', dom, re.DOTALL))
    ticks = {title: labels(plot, "y") for title, plot in plots.items()}
    at_the_top = {"Accuracy": "1", "F1 macro": "1", "R2": "1", "Matthews": "-0.5"}
    assert {title: ticks[title].get(text) for title, text in at_the_top.items()} == dict.fromkeys(at_the_top, 0)
    assert [ticks[title].get(text) for title, text in (("F1 macro", "0"), ("Matthews", "-1"))] == [100, 100]
    assert max(map(float, ticks["Perplexity"])) > 1, "no bound"
    assert [y for _, y in points(plots["Utilization (MFU)"], "smooth")] == [0, 0], "beyond its bound"


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize(("evaluations", "marked"), [(100, 1), (101, 0)])
def test_points_of_a_curve_are_marked_unless_they_are_many(
    run: Path, tmp_path: Path, evaluations: int, marked: int
) -> None:
    records = [{"step": step, "evaluation": {"a": {"loss": 1 / step}}} for step in range(1, evaluations + 1)]
    replace_metrics(run, records)
    assert draw(write_report(run), tmp_path).count('<path class="marks ') == marked


def points(plot: str, kind: str) -> list[tuple[float, float]]:
    paths = re.findall(rf'<path class="{kind} c\d" d="([^"]*)"', plot)
    return [(float(x), float(y)) for path in paths for x, y in re.findall(r"[ML]([\d.e+-]+),([\d.e+-]+)", path)]


def labels(plot: str, kind: str) -> dict[str, float]:
    """Text → percent from the left or the top."""
    return {text: float(at) for at, text in re.findall(rf'<span class="{kind}" style="\w+: ([\d.]+)%;">([^<]*)<', plot)}


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_matrices_and_pictures(run: Path, tmp_path: Path) -> None:
    """Matrices of 20 classes and galleries are pictures, which the page's content policy allows."""
    counts = [[label, (label + 1) % 20 if label % 4 == 0 else label, 3] for label in range(20)]
    (run / "confusion.json").write_text(json.dumps({"step": 1, "sets": {"held out": {"labels": [], "counts": counts}}}))
    (run / "pictures").mkdir()
    Image.new("RGB", (5, 4), "red").save(run / "pictures" / "a-00.png")
    gallery = {"title": "Shown", "note": "", "pictures": [{"file": "pictures/a-00.png", "caption": "caption"}]}
    (run / "pictures.json").write_text(json.dumps({"step": 1, "galleries": [gallery]}))
    dom = draw(write_report(run), tmp_path)
    assert dom.count('<img src="data:image/png') == 2
    assert "75.00 % of 60 right" in dom


def draw(page: Path, folder: Path, anchor: str = "") -> str:
    """The page's DOM once its script has run; it may not complain."""
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
    ]  # fmt: skip
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri() + anchor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout
