"""Ranks of one start meet in a store that still has what earlier starts left."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatfm.errors import MegatfmError
from megatfm.parallel.distributed import restart_store

SOON = timedelta(seconds=20)


def start(store: dist.Store, world_size: int, ranks: range | None = None) -> list[dist.Store]:
    """The parts that the ranks find, each in a thread, the later ones first."""
    came = threading.Barrier(len(ranks or range(world_size)))

    def rank(number: int) -> dist.Store:
        came.wait()
        return restart_store(store, number, world_size, SOON)

    numbers = list(ranks or range(world_size))
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(rank, reversed(numbers)))[::-1]


@pytest.mark.parametrize("later", [2, 3, 4])
def test_a_restart_has_a_part_of_the_store_of_its_own(later: int) -> None:
    store = dist.HashStore()
    first = start(store, 3)
    first[1].set("where", "an old port")
    assert [part.get("where") for part in first] == [b"an old port"] * 3
    second = start(store, later)
    assert not any(part.check(["where"]) for part in second)
    second[-1].set("where", "a new port")
    assert [part.get("where") for part in second] == [b"a new port"] * later
    assert first[0].get("where") == b"an old port"


def test_what_a_start_left_that_died_while_meeting_is_no_answer() -> None:
    store = dist.HashStore()
    store.set("megatfm/hello/1", "nobody")
    part, other = start(store, 2)
    part.set("where", "here")
    assert other.get("where") == b"here"


def test_ranks_that_do_not_come() -> None:
    store, at_once = dist.HashStore(), timedelta(seconds=0.2)
    restart_store(store, 0, 2, at_once)
    with pytest.raises(MegatfmError, match=r"rank 0 of 2 did not start within 0\.2 s"):
        restart_store(store, 1, 2, at_once)
