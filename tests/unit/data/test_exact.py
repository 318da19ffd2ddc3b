"""The data of a step is the same however many ranks and workers share it, and after any number of interruptions."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm.data.dataset import PackedDataset, RowDataset
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.mixture import Mixture, Phase
from megatfm.data.order import BatchSchedule, BatchStage, Interleave, RowOrder, make_row_order
from megatfm.data.workers import BLOCKED_SIGNALS, RowWorkers, _exit_code, worker_loop
from megatfm.errors import MegatfmError
from tests.support.packed_corpora import pack_dataset

BATCH = 24
BLOCKS = [[7, 40, 3], [22, 9], [1, 0, 64, 5], [30, 17, 12]] * 6


@pytest.fixture
def threaded_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are threads: the same pipes, pickled rows and answers, without the start of processes."""

    def start(self: Any) -> None:
        import pickle

        for _ in range(self._n):
            actual, expected = multiprocessing.Pipe()
            threading.Thread(target=worker_loop, args=(expected, pickle.dumps(self._own_rows)), daemon=True).start()
            self._pipes.append(actual)
            self._processes.append(FakeProcess())

    monkeypatch.setattr(RowWorkers, "_start", start)


class FakeProcess:
    """The part of a process that a loader uses when it closes."""

    pid = exitcode = 0

    def join(self, seconds: float = 0) -> None: ...

    def is_alive(self) -> bool:
        return False


@pytest.fixture(scope="module")
def rows(memory_corpus: Any, causal_type: Any) -> PackedDataset:
    return pack_dataset(memory_corpus(BLOCKS), causal_type(), sequence_length=16, seed=3, streams=BATCH)


@pytest.fixture(scope="module")
def mixture(memory_corpus: Any, causal_type: Any) -> Mixture:
    sources = {
        name: pack_dataset(memory_corpus(BLOCKS[:n]), causal_type(), sequence_length=16, seed=n, streams=BATCH)
        for name, n in (("a", 9), ("b", 20))
    }
    phases = [Phase(0, {"a": 1, "b": 2}), Phase(500, {"a": 3, "b": 1})]
    return Mixture(sources, phases, seed=1, streams=BATCH, block=16)


def run(
    rows: RowDataset, n: int, *, ranks: int = 1, ends: list[Any] | None = None, **options: Any
) -> Iterator[tuple[bytes, bytes]]:
    """Tokens and keys of `n` global batches; the state of the last rank's loader is added to `ends`."""
    options = {"global_batch": BATCH, "micro_batch": 1} | options
    loaders = [DataLoader(rows, data_rank=DataRank(rank, ranks), **options) for rank in range(ranks)]
    for _ in range(n):
        parts = [batch for loader in loaders for batch in next(loader)]
        yield tuple(b"".join(part[name].tobytes() for part in parts) for name in ("tokens", "keys"))  # type: ignore[misc]
    if ends is not None:
        ends.append(json.dumps(loaders[-1].state_dict()))
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_number_of_ranks_and_workers_reads_the_same(
    rows: PackedDataset, threaded_workers: None, ranks: int, workers: int
) -> None:
    steps = -(-len(rows) // BATCH)
    actual = list(run(rows, steps, ranks=ranks, workers=workers))
    expected = [rows.read_row(position)["tokens"].tobytes() for position in range(steps * BATCH)]
    assert b"".join(tokens for tokens, _ in actual) == b"".join(expected)
    keys = np.frombuffer(b"".join(keys for _, keys in actual), np.int64)
    assert len(set(keys.tolist())) == len(keys)
    tokens = np.frombuffer(b"".join(expected[: len(rows)]), np.int64)
    corpus: Any = rows.corpus
    every = Counter(token for document in corpus.documents for token in document.tolist())
    assert Counter(tokens[tokens >= 10].tolist()) == every


@pytest.mark.parametrize("times", [16, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", ["rows", "mixture"])
def test_kills_do_not_change_rows(of: str, times: int, request: pytest.FixtureRequest, threaded_workers: None) -> None:
    rows: RowDataset = request.getfixturevalue(of)
    warmup = BatchSchedule(BATCH, (BatchStage(times // 5, 24, 4), BatchStage(times // 3, 48, 2)))
    draw = np.random.default_rng(0)
    lives = draw.integers(0, 3, times).tolist()
    full = list(run(rows, sum(lives), global_batch=warmup))
    position = step = 0
    for life in lives:
        ranks, workers = int(draw.choice([1, 2, 3, 4, 6, 8])), int(draw.choice([0, 0, 0, 2]))
        ends: list[Any] = []
        options = {"global_batch": warmup, "position": position, "step": step, "workers": workers}
        actual = list(run(rows, life, ranks=ranks, ends=ends, **options))
        assert actual == full[step : step + life]
        position = json.loads(ends[0])["position"]
        step += life
    assert position == sum(warmup.stage(i).global_batch for i in range(step))
    assert step > 0.8 * times


@pytest.mark.parametrize("already", [False, True], ids=["dying", "dead"])
def test_processes_give_the_same_rows_and_their_ends_are_reported(rows: PackedDataset, already: bool) -> None:
    expected = [rows.read_row(position)["tokens"] for position in range(20)]
    with DataLoader(rows, global_batch=10, micro_batch=10, workers=2) as loader:
        np.testing.assert_array_equal(next(loader)[0]["tokens"], np.stack(expected[:10]))
        assert len(loader.worker_pids) == 2
        for pid, number in itertools.product(loader.worker_pids, BLOCKED_SIGNALS):
            os.kill(pid, number)  # the trainer still needs them for the step after which it saves
        np.testing.assert_array_equal(next(loader)[0]["tokens"], np.stack(expected[10:]))
        pid = loader.worker_pids[1]
        child = next(child for child in multiprocessing.active_children() if child.pid == pid)
        os.kill(pid, signal.SIGKILL)
        if already:  # before it is asked
            child.join()
        reason = r"died with exit code -9: the machine may be short of memory: set data\.workers to fewer"
        with pytest.raises(MegatfmError, match=rf"data worker 1 \(pid \d+\) {reason}"):
            list(loader)
    assert not [child for child in multiprocessing.active_children() if "megatfm-data" in child.name]


UNGUARDED = """
from megatfm.data.workers import RowWorkers
RowWorkers(str, 1).read_rows([0])
"""


def test_a_script_without_a_guard_is_no_lack_of_memory(tmp_path: Path) -> None:
    """Each worker imports the script, which would start workers again; multiprocessing refuses that."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    completed = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert "died with exit code 1: its error is on stderr\n" in completed.stderr
    assert "before the\n        current process has finished its bootstrapping phase" in completed.stderr


class Stuck:
    """Rows of which none comes, as from a file system that doesn't answer; notes in a file that one was asked for."""

    seed, row_tokens, splits, notes = 0, 1, True, ()

    def __init__(self, requested: Path) -> None:
        self.asked = requested

    def read_rows(self, positions: Any) -> Any:
        self.asked.touch()
        time.sleep(3600)


def test_a_worker_that_hangs_is_killed_when_the_loader_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for it in another thread gets an error."""
    monkeypatch.setattr("megatfm.data.workers.END_SECONDS", 0.5)
    stuck: Any = Stuck(tmp_path / "asked")
    loader = DataLoader(stuck, global_batch=2, micro_batch=2, workers=1)
    with ThreadPoolExecutor(2) as threads:
        consumer = threads.submit(next, loader)
        for _ in range(6000):
            if stuck.asked.exists():
                break
            time.sleep(0.01)
        threads.submit(loader.close).result(60)
        with pytest.raises(MegatfmError, match=r"data worker 0 .* died"):
            consumer.result(60)
    assert not [child for child in multiprocessing.active_children() if "megatfm-data" in child.name]
    loader.close()


def test_a_late_exit_code_is_waited_for() -> None:
    """Another thread may ask the system for it at the same time."""

    class Late(FakeProcess):
        left = 3

        @property
        def exitcode(self) -> int | None:  # type: ignore[override]
            self.left -= 1
            return None if self.left > 0 else -9

    assert _exit_code(Late()) == -9


def test_worker_errors_come_with_their_traceback(memory_corpus: Any, causal_type: Any, threaded_workers: None) -> None:
    corpus = memory_corpus([[30]] * 4)
    rows = pack_dataset(corpus, causal_type(), sequence_length=8, seed=0, streams=1, shuffle=False)
    corpus.documents[2] = corpus.documents[2][:5]
    with (
        DataLoader(rows, global_batch=4, micro_batch=4, workers=2) as loader,
        pytest.raises(MegatfmError, match="block 2 has 6 tokens, but its packing plan says 31") as caught,
    ):
        list(loader)
    assert "in _pack" in "".join(caught.value.__notes__)


class Unsendable(Exception):
    """An error that can't be pickled, not even where a library (tblib) has taught pickle the classes of errors."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Refusing(Stuck):
    def read_rows(self, positions: Any) -> Any:
        raise Unsendable("rows are gone")


class Unreadable(Stuck):
    def __setstate__(self, state: Any) -> None:
        raise Unsendable("rows are gone")


@pytest.mark.parametrize("kind", [Refusing, Unreadable])
def test_errors_that_can_not_be_sent_come_as_their_text(kind: Any, tmp_path: Path, threaded_workers: None) -> None:
    with (
        DataLoader(kind(tmp_path), global_batch=2, micro_batch=2, workers=1) as loader,
        pytest.raises(MegatfmError, match=r"^a data worker failed: Unsendable: rows are gone$"),
    ):
        next(loader)


def test_the_order_of_a_trillion_samples_fits_in_little_memory() -> None:
    """10¹² rows in 8·10⁹ blocks: 2²⁰ units, of which a stream opens one at a time."""
    unit, rows_per_block = 7630, 125
    sizes = np.full(2**20, unit * rows_per_block)

    def block_rows(begin: int, end: int) -> np.ndarray:
        return np.full(end - begin, rows_per_block)

    tracemalloc.start()
    order = RowOrder(sizes, unit, block_rows, seed=1, streams=64, shuffle=True)
    assert len(order) > 10**12
    n = len(order)
    places = [order.find_row(int(share * n)) for share in np.random.default_rng(0).random(300)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 2**20
    assert len({place.block for place in places}) == 300
    assert order.find_row(n).epoch == 1


def test_units_of_many_blocks_have_every_row_once() -> None:
    counts = np.random.default_rng(0).integers(0, 9, 100)
    for max_units in (7, 30, 100):
        for turn in (1, 3):
            order = make_row_order(counts, seed=5, streams=Interleave(6, turn), shuffle=True, max_units=max_units)
            for epoch in (0, 2):
                row_counts = Counter(order.find_row(epoch * len(order) + k) for k in range(len(order)))
                assert row_counts == Counter((epoch, b, r) for b, n in enumerate(counts.tolist()) for r in range(n))


def test_units_of_many_blocks_are_uniform() -> None:
    """Which of 24 blocks comes first, over seeds: χ² with 23 degrees of freedom, its 99.99th percentile is 58."""
    counts = np.full(24, 2)
    for max_units in (6, 24):
        orders = (make_row_order(counts, seed=s, streams=1, shuffle=True, max_units=max_units) for s in range(2400))
        first = [order.find_row(0).block for order in orders]
        first_counts = np.bincount(first, minlength=24)
        assert ((first_counts - 100) ** 2 / 100).sum() < 58
