"""Helpers shared by the scripts: turns and ratios, results of the day, facts of the machine."""

import json
import mmap
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmark_scripts import BENCHMARKS, script


@pytest.fixture(scope="module")
def common() -> Any:
    return script("common")


def test_sides_take_turns_and_theirs_is_divided_by_ours(common: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def step(side: str, seconds: float) -> None:
        order.append(side)
        now[0] += seconds

    monkeypatch.setattr(common, "CLOCKS", {"wall": lambda: now[0]})
    sides = [common.make_side(lambda: step("ours", 2.0)), common.make_side(lambda: step("theirs", 3.0))]
    ratios = common.compare(*sides, 3)
    assert order == [
        "ours",
        "ours",
        "theirs",
        "theirs",
        *("theirs", "ours"),
        *("ours", "theirs"),
        *("theirs", "ours"),
    ]
    assert ratios == {"wall": [1.5, 1.5, 1.5]}


def test_a_summary_holds_the_median_with_both_ends(common: Any) -> None:
    summary = common.summarize({"wall": [1.0, 4.0, 2.0]})
    assert summary == {"wall": 2.0, "wall_lowest": 1.0, "wall_highest": 4.0}


def test_the_ratio_is_the_median_within_rounds_and_not_that_of_medians(common: Any) -> None:
    over, under = [1.0, 20.0, 30.0], [1.0, 2.0, 100.0]
    assert common.compute_median_ratio(over, under) == 1.0
    assert statistics.median(over) / statistics.median(under) == 10.0
    with pytest.raises(ValueError, match="shorter"):
        common.compute_median_ratio(over, under[:2])


def test_every_item_has_its_turn_in_every_round(common: Any) -> None:
    items = "abcde"
    assert (
        "".join(common.alternate_order(items, 1)) == items == "".join(common.alternate_order(items, 2)[::-1])
    )
    orders = {"".join(common.shuffle_order(items, number)) for number in range(20)}
    assert len(orders) > 10
    assert all(sorted(order) == list(items) for order in orders)
    assert common.shuffle_order(items, 3) == common.shuffle_order(items, 3)


def test_a_page_is_written_anew_with_each_row(common: Any, tmp_path: Path) -> None:
    path = common.make_dated_path(common.make_output_folder(str(tmp_path / "a/b")), "x.md")
    page = common.Page(path, "# Title", "")
    assert not path.exists(), "nothing was measured"
    page.add("| one |")
    page.add("| two |", "| drei ÷ |")
    assert path.read_text(encoding="utf-8") == "# Title\n\n| one |\n| two |\n| drei ÷ |\n"
    assert path.name == f"{common.today()}-x.md"
    common.write_json(common.make_output_file(str(tmp_path / "c/d.json")), {"a": [1]})
    assert json.loads((tmp_path / "c/d.json").read_text(encoding="utf-8")) == {"a": [1]}
    assert common.make_dated_path(None, "x.md") is None
    common.write_text(None, "is not written")


def test_peak_memory_can_be_reset(common: Any) -> None:
    size = 64 * 2**20
    with mmap.mmap(-1, size) as block:  # the allocator may have such a block at hand
        block.write(bytes(size))
    before = common.read_memory("VmHWM")
    common.reset_peak_memory()
    now = common.read_memory("VmRSS")
    assert common.read_memory("VmHWM") <= before
    with mmap.mmap(-1, size) as block:
        for start in range(0, size, 4096):
            block[start] = 1
        assert common.read_memory("VmHWM") - now > 0.9 * size
        assert 0 < common.read_memory("Pss", "smaps_rollup") <= common.read_memory("VmRSS") + 2**20


def test_common_needs_python_alone() -> None:
    """`make gpu` imports it where nothing is installed, and others time what they import."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import common; print(common.get_cpu_name())"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
