"""What is checked before training, a part at a time; test_resilience.py breaks things under a whole run."""

from pathlib import Path

import pytest
import torch

from megatfm.errors import MegatfmError
from megatfm.train import preflight
from megatfm.train.preflight import find_slow, free_memory, probe_disk, product_seconds


def test_a_probe_leaves_a_file_for_rank_0_to_find(tmp_path: Path) -> None:
    probe_disk(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == [".probe-3"]


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".probe-3.tmp").mkdir()  # root may write where permissions forbid it
    with pytest.raises(
        MegatfmError, match=rf"{tmp_path}: can't write, sync and rename a file there: Is a directory"
    ):
        probe_disk(tmp_path, 3)
    with pytest.raises(MegatfmError, match="No such file"):
        probe_disk(tmp_path / "gone", 3)


def test_slow_is_far_above_the_median_and_beyond_what_happens() -> None:
    disk, product, total = "writing and syncing a file", "a matrix product", "a sum over tp"
    well = {disk: 0.01, product: 0.002, total: 0.01}
    everyone = [("n0", well), ("n0", well), ("n1", well), ("n1", well)]
    assert find_slow(everyone) == []
    everyone[2] = ("n1", well | {disk: 0.4, product: 0.006, total: 0.15})
    assert find_slow(everyone) == [], "many times the median, but that happens"
    everyone[2] = ("n1", well | {disk: 0.9, product: 0.02})
    assert find_slow(everyone) == [
        "rank 2 on n1 is slow: writing and syncing a file took 0.900 s, on most ranks 0.010 s",
        "rank 2 on n1 is slow: a matrix product took 0.020 s, on most ranks 0.002 s",
    ]
    assert len(find_slow([("n0", well), ("n1", well | {disk: 0.9})])) == 1, "of two, the slower one"
    slow = {disk: 5.0, product: 1.0, total: 5.0}
    assert find_slow([("n0", slow)] * 4) == [], "alike: nobody stands out"


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = free_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.2)


def test_the_product_is_timed() -> None:
    assert 0 < product_seconds(torch.device("cpu")) < 5
    assert preflight.SLOW > 1
