"""The report in a real browser: its script runs, nothing else does, and the console stays empty."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from megatfm.report import write_report
from tests.support.reported_runs import CHROMIUM


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_the_page_without_a_complaint(run: Path, tmp_path: Path) -> None:
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
def test_points_ticks_and_levels_lie_on_the_same_axes(run: Path, tmp_path: Path) -> None:
    """Linear and logarithmic axes, gaps, levels that share a label, and odd ranges, as the page's script draws them."""
    lines: list[dict[str, object]] = [
        {
            "step": 0,
            "loss": 4.0,
            "grad_norm": 0.01,
            "lr": 0.0,
            "tokens_per_second": 2.0,
            "memory_bytes": 2**30,
        },
        {
            "step": 50,
            "loss": 2.0,
            "grad_norm": 1.0,
            "lr": 0.0,
            "tokens_per_second": "NaN",
            "memory_bytes": 1e38,
        },
        {
            "step": 100,
            "loss": 1.0,
            "grad_norm": 100.0,
            "lr": 0.0,
            "tokens_per_second": 1.0,
            "memory_bytes": 1,
        },
    ]
    lines[2]["evaluation"] = {"stdlib": {"bits_per_byte": 1.5}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    assert [y for _, y in norm] == pytest.approx(
        [10 * ticks[value] for value in ("0.01", "1", "100")], abs=0.1
    )
    (speed,) = re.findall(r'<path class="smooth c1" d="([^"]+)"', plots["Speed"])
    assert speed.count("M") == 2, "a step without a number breaks the line"
    assert list(labels(plots["Bits per byte"], "level")) == ["c 2.01 · b 2", "a 1"]
    (bits,) = points(plots["Bits per byte"], "marks")
    shown = labels(plots["Bits per byte"], "level")
    assert bits[1] == pytest.approx(5 * (shown["a 1"] + shown["c 2.01 · b 2"]), abs=5)


def points(plot: str, kind: str) -> list[tuple[float, float]]:
    paths = re.findall(rf'<path class="{kind} c\d" d="([^"]*)"', plot)
    return [
        (float(x), float(y)) for path in paths for x, y in re.findall(r"[ML]([\d.e+-]+),([\d.e+-]+)", path)
    ]


def labels(plot: str, kind: str) -> dict[str, float]:
    """Text → percent from the left or the top."""
    return {
        text: float(at)
        for at, text in re.findall(rf'<span class="{kind}" style="\w+: ([\d.]+)%;">([^<]*)<', plot)
    }


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_matrices_and_pictures_are_drawn(run: Path, tmp_path: Path) -> None:
    """Of 20 classes the matrix is a picture, which the page's own policy lets through, and so are galleries."""
    counts = [[label, (label + 1) % 20 if label % 4 == 0 else label, 3] for label in range(20)]
    (run / "confusion.json").write_text(
        json.dumps({"step": 1, "sets": {"held out": {"labels": [], "counts": counts}}})
    )
    (run / "pictures").mkdir()
    Image.new("RGB", (5, 4), "red").save(run / "pictures" / "a-00.png")
    gallery = {
        "title": "Shown",
        "note": "",
        "pictures": [{"file": "pictures/a-00.png", "caption": "caption"}],
    }
    (run / "pictures.json").write_text(json.dumps({"step": 1, "galleries": [gallery]}))
    dom = draw(write_report(run), tmp_path)
    assert dom.count('<img src="data:image/png') == 2
    assert "75.00 % of 60 right" in dom


def draw(page: Path, folder: Path) -> str:
    """The page's DOM once its script has run; it may not complain."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout
