"""The report in a real browser: its script runs, nothing else does, and the console stays empty."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatfm.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_the_page_without_a_complaint(run: Path, tmp_path: Path) -> None:
    evil = "<script>document.title = 'taken over'</script><img src='http://example.invalid/x.png'>"
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": evil, "text": evil}) + "\n")
    page = write_report(run)
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    dom = done.stdout
    assert "<title>synthetic · megatfm report</title>" in dom
    assert "&lt;script&gt;document.title" in dom
    # Every chart has its curve, and the page's own script has put a reading line into it.
    plots = dom.split('<div class="plot"')[1:]
    assert len(plots) == 7
    for plot in plots:
        assert re.search(r'<path class="(smooth|line|dots) c\d" data-name="[^"]+" d="M[\d.]+,[\d.]+h0L', plot)
        assert '<div class="cursor"></div>' in plot
