"""Ranks and micro-batches only divide the order; a position is all that a resume needs."""

import gc
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import SINGLE_RANK, DataLoader, DataRank
from megatfm.data.order import BatchSchedule, BatchStage
from megatfm.errors import UsageError
from tests.support.packed_corpora import assert_same_fields, pack_dataset, read_row

Batch = dict[str, np.ndarray]

PATIENCE = 120
"""Seconds after which what does not come never will, on however busy a machine."""


@pytest.fixture
def rows(corpus: Corpus, causal: Any) -> PackedDataset:
    return pack_dataset(corpus, causal, sequence_length=64, seed=3, streams=8)


def steps(rows: PackedDataset, n: int, **options: Any) -> list[list[Batch]]:
    with DataLoader(rows, **({"global_batch": 8, "micro_batch": 2} | options)) as loader:
        return [next(loader) for _ in range(n)]


def joined(step: list[Batch]) -> np.ndarray:
    return np.concatenate([batch["tokens"] for batch in step])


def reference(rows: PackedDataset, start: int, n: int) -> np.ndarray:
    return np.stack([rows.read_row(position)["tokens"] for position in range(start, start + n)])


def watch_reads(rows: PackedDataset, call: Callable[[Sequence[int | None]], Any]) -> None:
    """Call a function with the positions of each read of rows, once it is done."""
    read = rows.read_rows

    def watched(positions: Sequence[int | None]) -> Batch:
        batch = read(positions)
        call(positions)
        return batch

    rows.read_rows = watched  # type: ignore[method-assign]


def fail_at(rows: PackedDataset, position: int) -> None:
    def failing(positions: Sequence[int | None]) -> None:
        if position in positions:
            raise ZeroDivisionError(f"at {position}")

    watch_reads(rows, failing)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_rows_of_one_document_come_without_its_number(rows: PackedDataset, micro_batch: int) -> None:
    """Any other row brings a mask with it: documents that begin in it, and padding."""
    actual = [batch for step in steps(rows, 6, micro_batch=micro_batch, end_position=45) for batch in step]
    for number, batch in enumerate(actual):
        places = range(number * micro_batch, (number + 1) * micro_batch)
        expected = np.stack([read_row(rows, at if at < 45 else None)["documents"] for at in places])
        assert ("documents" in batch) == bool(expected.any())
        np.testing.assert_array_equal(batch.get("documents", np.zeros_like(expected)), expected)
    assert 0 < sum("documents" in batch for batch in actual) < len(actual)


def test_the_share_of_padding_is_reported(rows: PackedDataset) -> None:
    with DataLoader(rows, global_batch=8, micro_batch=2, end_position=13) as loader:
        for first in (0, 8):
            next(loader)
            actual = [read_row(rows, at if at < 13 else None)["documents"] for at in range(first, first + 8)]
            assert loader.padding == (np.stack(actual) == -1).mean()
    assert loader.padding == 3 / 8


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_ranks_and_micro_batches_only_divide_the_order(rows: PackedDataset, data_ranks: int, micro_batch: int) -> None:
    n = len(rows) // 8 + 3  # into the next epoch
    ranks = [
        steps(rows, n, micro_batch=micro_batch, data_rank=DataRank(rank, data_ranks)) for rank in range(data_ranks)
    ]
    for t in range(n):
        parts = [ranks[rank][t] for rank in range(data_ranks)]
        assert all(len(part) == 8 // data_ranks // micro_batch for part in parts)
        for batch in (batch for part in parts for batch in part):
            assert batch.keys() | {"documents"} == {"tokens", "targets", "documents", "positions", "keys"}
            assert batch["keys"].shape == (micro_batch,)
            assert batch["keys"].dtype == np.int64
            fields = [batch[name] for name in batch.keys() - {"keys"}]
            assert {(field.shape, field.dtype) for field in fields} == {((micro_batch, 64), np.dtype(np.int64))}
        np.testing.assert_array_equal(np.concatenate([joined(part) for part in parts]), reference(rows, 8 * t, 8))


def test_the_state_counts_what_was_consumed_not_what_was_fetched(rows: PackedDataset) -> None:
    fetched = threading.Event()
    watch_reads(rows, lambda positions: fetched.set() if 15 in positions else None)
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
        assert fetched.wait(PATIENCE), "the second step is fetched ahead"
        assert loader.state_dict() == {"position": 8, "epoch": 0, **rows.order_config()}
        assert loader.state_dict()["fingerprint"] == rows.corpus.fingerprint


def test_two_steps_are_ready_before_they_are_asked_for(rows: PackedDataset) -> None:
    """A consumer whose step takes longer than its data therefore waits for the first step only."""
    ready = threading.Semaphore(0)
    watch_reads(rows, lambda _: ready.release())
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
        for _ in range(3):
            assert ready.acquire(timeout=PATIENCE)
        for _ in range(5):  # one step is taken, and one more is made without being asked for
            next(loader)
            assert ready.acquire(timeout=PATIENCE)


def test_with_a_stop_every_row_comes_once_and_padding_fills_the_last_step(rows: PackedDataset) -> None:
    n = len(rows)
    assert n % 8, "so that there is something to fill"
    with DataLoader(rows, global_batch=8, micro_batch=4, end_position=n) as loader:
        read = np.concatenate([joined(step) for step in loader])
        assert loader.position == -(-n // 8) * 8
        assert list(loader) == []
    np.testing.assert_array_equal(read[:n], reference(rows, 0, n))
    np.testing.assert_array_equal(read[n:], np.stack([read_row(rows, None)["tokens"]] * (-n % 8)))


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "nearest"), [(10, 4, 2, 8), (13, 4, 2, 16), (1, 4, 2, 8), (0, 4, 1, 4), (7, 1, 3, 6)]
)
def test_odd_batches_name_the_nearest(rows: PackedDataset, batch: int, micro: int, ranks: int, nearest: int) -> None:
    message = rf"train\.global_batch = {batch} is not a multiple of .* is {nearest}(, or choose .*)?$"
    with pytest.raises(UsageError, match=message):
        DataLoader(rows, global_batch=batch, micro_batch=micro, data_rank=DataRank(0, ranks))
    DataLoader(rows, global_batch=nearest, micro_batch=micro, data_rank=DataRank(0, ranks)).close()


def test_an_error_of_the_thread_is_raised_here_with_its_traceback(rows: PackedDataset) -> None:
    fail_at(rows, 16)
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
        next(loader)
        with pytest.raises(ZeroDivisionError, match="at 16") as caught:
            next(loader)
        assert "in failing" in "".join(traceback.format_exception(caught.value))
        with pytest.raises(ZeroDivisionError, match="at 16"):
            next(loader)
        assert loader.position == 16


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megatfm-loader")]


def test_no_thread_outlives_its_loader(rows: PackedDataset) -> None:
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
        assert len(loader_threads()) == 2
    assert not loader_threads()
    loader.close()
    forgotten = DataLoader(rows, global_batch=8, micro_batch=8)
    next(forgotten)
    threads = loader_threads()
    del forgotten
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
    assert not loader_threads()


def test_the_wait_of_the_consumer_is_measured(rows: PackedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr("megatfm.data.loader.perf_counter", lambda: next(ticks))
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
        assert loader.wait_seconds == 0.5
        next(loader)
        assert loader.wait_seconds == 2.5


def test_a_block_goes_when_its_last_row_was_taken_by_whichever_thread(rows: PackedDataset) -> None:
    """Eight threads take all rows of two epochs; were one not counted, its block would stay."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(rows.read_row, range(2 * len(rows))):
                pass
    finally:
        sys.setswitchinterval(interval)
    assert len(rows._cache) == 0


class ThreadReaders:
    """Readers that are threads of this process."""

    def __init__(self, rank: int, count: int, meet: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.count, self._meet, self._table = rank, count, meet, table

    def all_gather(self, local_rows: Any, n_readers: int) -> list[Any]:
        self._table[self.rank] = local_rows
        self._meet.wait(PATIENCE)
        message = self._table[:n_readers]
        self._meet.wait(PATIENCE)
        return message


def read_together(rows: PackedDataset, count: int, n: int, place: DataRank = SINGLE_RANK, **options: Any) -> list[Any]:
    """Batches of n steps, or the errors that readers raise. place: data rank of all readers."""
    meet, table = threading.Barrier(count), [None] * count

    def read(rank: int) -> Any:
        try:
            return steps(rows, n, data_rank=place._replace(readers=ThreadReaders(rank, count, meet, table)), **options)
        except ZeroDivisionError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(read, range(count)))


WARMING = BatchSchedule(8, (BatchStage(2, 4, 4), BatchStage(2, 2, 2)))


@pytest.mark.parametrize("batch", [8, 2, WARMING], ids=["8 rows", "fewer rows than readers", "warming up"])
def test_readers_of_the_same_rows_read_each_once_and_get_all(rows: PackedDataset, batch: int | BatchSchedule) -> None:
    n, requested = 7, list[int | None]()
    full = steps(rows, n, global_batch=batch, micro_batch=1, data_rank=DataRank(1, 2))
    watch_reads(rows, requested.extend)
    actual = read_together(rows, 3, n, DataRank(1, 2), global_batch=batch, micro_batch=1)
    for item in actual:
        for one, two in zip(full, item, strict=True):
            for received, expected in zip(one, two, strict=True):
                assert_same_fields(received, expected)
    assert len(requested) == len(set(requested)), "a row that was read twice"


def test_an_error_of_one_reader_is_raised_by_all(rows: PackedDataset) -> None:
    fail_at(rows, 12)
    actual = read_together(rows, 2, 3, global_batch=8, micro_batch=2)
    assert [str(item) for item in actual] == ["at 12"] * 2
    assert any("in failing" in "".join(traceback.format_exception(item)) for item in actual)


def test_no_thread_is_the_first_to_import_a_part_of_numpy() -> None:
    """np.unique imports numpy.ma at its first call; of two threads that do so at once, one recurses without end."""
    program = "import sys, megatfm.data.loader; print('numpy.ma' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "True"
