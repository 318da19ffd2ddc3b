"""The page of an estimate, by hand and as a parser of HTML sees it, and the written config of a chosen layout."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatfm.config import load_config
from megatfm.errors import UsageError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import estimator
from megatfm.estimate.page import (
    MEMORY_PARTS,
    WIDTH,
    ScalePoint,
    memory_drawing,
    memory_parts,
    scaling_lines,
    timeline_drawing,
    write_page,
)
from megatfm.estimate.write import layout_config, write_layout


class Reader(HTMLParser):
    """Collects tags, texts and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_has_memory_schedule_and_scaling(tmp_path: Path) -> None:
    overrides = ["parallel.pp=4", "parallel.zero=1", "train.global_batch=64", "train.micro_batch=1"]
    config = load_config("gpt2-124m", overrides)
    with estimator(config, load_cluster("h100", 8)) as opened:
        estimate = opened.estimate(opened.base)
        write_page(opened, estimate, tmp_path / "page.html")
        with pytest.raises(UsageError, match="the file exists"):
            write_page(opened, estimate, tmp_path / "page.html")
    memory, timeline = memory_drawing(estimate), timeline_drawing(estimate)
    assert timeline is not None
    assert len(memory.boxes) == 4 * len(MEMORY_PARTS)
    for rank, held in zip(range(4), estimate.memory, strict=True):
        widths = [
            box.width for box in memory.boxes[rank * len(MEMORY_PARTS) : (rank + 1) * len(MEMORY_PARTS)]
        ]
        assert sum(memory_parts(held).values()) == held.total
        assert memory.limit is not None
        share = held.total / estimate.cluster.device.memory_bytes
        assert sum(widths) == pytest.approx(memory.limit * share)
    assert len(timeline.boxes) == 4 * 32 * 2  # 32 micro-batches of each of two data ranks, both passes
    assert max(box.x + box.width for box in timeline.boxes) == pytest.approx(WIDTH)
    reader = Reader()
    reader.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert reader.tags.count("rect") == len(memory.boxes) + len(timeline.boxes)
    assert reader.tags.count("polyline") == 2
    assert reader.addresses == ["data:,"]
    assert "gpt2-124m, estimated" in reader.texts
    assert "fits" in reader.texts


def test_scaling_lines_of_a_run_that_scales_perfectly_are_one() -> None:
    points = [ScalePoint(gpus, 100.0 * gpus) for gpus in (2, 4, 32)]
    curve, ideal = scaling_lines(points)
    assert ideal == [pytest.approx((0, 100)), pytest.approx((100, 0))]
    assert curve == [pytest.approx((0, 100)), pytest.approx((25, 75)), pytest.approx((100, 0))]
    assert scaling_lines(points[:1]) == ([], [])


def test_the_written_config_is_the_chosen_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("written")
    with estimator(load_config("gpt2-124m", []), load_cluster("h100", 8), (1, 2)) as small:
        chosen = small.base.with_changes({"parallel.tp": 2, "parallel.zero": 1, "train.micro_batch": 4})
        estimate = small.estimate(chosen)
    write_layout("gpt2-124m", estimate, folder / "best.toml")
    text = layout_config("gpt2-124m", estimate)
    assert "tp = 2" in text
    assert load_config(str(folder / "best.toml"), []).parallel == estimate.config.parallel
    with pytest.raises(UsageError, match="the file exists"):
        write_layout("gpt2-124m", estimate, folder / "best.toml")
