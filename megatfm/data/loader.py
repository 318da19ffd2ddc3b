"""The data loader: selects the rows of a data rank at each step, and prefetches them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.ma  # np.unique would import it at its first call, which fails in two threads at once
from numpy.typing import NDArray

from megatfm.config.world_size import check_global_batch
from megatfm.data.dataset import RowDataset, join_rows
from megatfm.data.order import BatchSchedule
from megatfm.data.sequences import PAD_DOCUMENT_ID, Fields
from megatfm.data.workers import RowWorkers, make_picklable_error
from megatfm.errors import UsageError
from megatfm.rng import row_keys, short_row_keys

STEPS_AHEAD = 2

T = TypeVar("T")


class ReaderGroup(Protocol):
    """Ranks that train on the same rows. Each of the first ranks reads a share and sends it to all others."""

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        ...

    @property
    def count(self) -> int: ...

    def all_gather(self, local_rows: T, n_readers: int) -> list[T]:
        """All-gather the values of the first readers, by rank, to every rank of the group. Collective."""
        ...


class _SingleReader:
    rank, count = 0, 1

    def all_gather(self, local_rows: T, n_readers: int) -> list[T]:
        return [local_rows]


SINGLE_READER: ReaderGroup = _SingleReader()
"""The group of a rank that reads all its rows itself."""


class DataRank(NamedTuple):
    """A rank among the `ranks` that share the rows of a step, and the group of those that need the same rows as it."""

    rank: int
    ranks: int
    readers: ReaderGroup = SINGLE_READER


SINGLE_RANK = DataRank(0, 1)
"""A rank that reads all rows of a step."""


class _RowRange(NamedTuple):
    """A data rank's rows of a step: `rows` positions from `first`, each split into `splits_per_row` shorter rows."""

    first: int
    rows: int
    splits_per_row: int


class _PrefetchedStep(NamedTuple):
    global_batch: int
    row_range: _RowRange
    read: Future[Fields | None]


class DataLoader(Iterator[list[Fields]]):
    """Yields for each step the list of this data rank's micro-batches: arrays [micro_batch, …] by field.

    Fields are those of the `RowDataset`, and "keys" [micro_batch]: a random key ≥ 0 per row that depends on the row's
    position and the seed alone, so that random draws do not depend on ranks, micro-batches or resumes. "documents" is
    left out if every row of a micro-batch is one document from end to end.

    A step consumes `global_batch` positions from `position` on; each rank takes a contiguous slice. So the global batch
    of a step is the same for any number of ranks, and a resume starts at the position and step that were reached. With
    a `BatchSchedule`, batch size and row length depend on the step; a row split into parts yields one row per part.
    With `end_position`, later positions are rows of padding, and iteration ends after the step that reaches it.

    Two threads prefetch one step each; with `workers` processes, one thread waits for them. Errors are raised by
    `next`. If several readers need the same rows, each fetches its share of a step. They exchange shares only when the
    step is requested, so no communication is pending when some of them stop. An error on one rank is raised on all.
    Close the loader (or use `with`) when done.

    wait_seconds: total time that the consumer waited for data. step_tokens: token capacity of the last step, over all
    ranks. padding: share of padding in this rank's rows of that step. row_positions: positions [rows] of the rows of
    each of its micro-batches.

    Raises a UsageError if a global batch is not a multiple of micro-batch × data ranks.
    """

    def __init__(
        self,
        rows: RowDataset,
        *,
        global_batch: int | BatchSchedule,
        micro_batch: int,
        data_rank: DataRank = SINGLE_RANK,
        position: int = 0,
        step: int = 0,
        end_position: int | None = None,
        workers: int = 0,
    ) -> None:
        self.batch_schedule = global_batch if isinstance(global_batch, BatchSchedule) else BatchSchedule(global_batch)
        for batch in self.batch_schedule.batches:
            is_last = batch == self.batch_schedule.global_batch
            key = "train.global_batch" if is_last else "data.rampup: global_batch"
            check_global_batch(batch, micro_batch, data_rank.ranks, key)
        if any(stage.splits_per_row > 1 for stage in self.batch_schedule.rampup) and not rows.can_split_rows:
            raise UsageError(
                "data.rampup: this objective's sequences are whole, so rows can't be cut into shorter ones: leave "
                "sequence_length out of its stages"
            )
        self.rows = rows
        self.micro_batch = micro_batch
        self.position = position
        self.end_position = end_position
        self.wait_seconds, self.step_tokens, self.padding = 0.0, 0, 0.0
        self.row_positions: list[NDArray[np.int64]] = []
        self._data_rank, self._readers = data_rank, data_rank.readers
        self._workers = RowWorkers(rows, workers)
        # Each thread prefetches one step; worker processes take requests from one thread only.
        threads = 1 if workers else STEPS_AHEAD
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="megatfm-loader")
        self._ahead: deque[_PrefetchedStep] = deque()
        self._next_position, self._next_step = position, step

    def __next__(self) -> list[Fields]:
        self._prefetch()
        if not self._ahead:
            raise StopIteration
        start = perf_counter()
        step, self.padding = self._step(self._ahead[0])
        first, n_rows, splits_per_row = self._ahead[0].row_range
        positions = np.repeat(np.arange(first, first + n_rows), splits_per_row)
        self.row_positions = np.split(positions, len(step))
        self.wait_seconds += perf_counter() - start
        global_batch = self._ahead.popleft().global_batch
        self.position += global_batch
        self.step_tokens = global_batch * self.rows.row_tokens
        self._prefetch()
        return step

    def _prefetch(self) -> None:
        """Start fetching the next steps."""
        while len(self._ahead) < STEPS_AHEAD and (self.end_position is None or self._next_position < self.end_position):
            stage = self.batch_schedule.stage(self._next_step)
            share = stage.global_batch // self._data_rank.ranks
            row_range = _RowRange(self._next_position + self._data_rank.rank * share, share, stage.splits_per_row)
            self._ahead.append(
                _PrefetchedStep(stage.global_batch, row_range, self._executor.submit(self._read, row_range))
            )
            self._next_position += stage.global_batch
            self._next_step += 1

    def state_dict(self) -> dict[str, str | int | bool]:
        """Return the position up to which rows were consumed (not prefetched), and the settings of the order."""
        state = {"position": self.position, "epoch": self.rows.epoch(self.position), **self.rows.order_config()}
        if self.batch_schedule.rampup:
            state["warmup"] = str([tuple(stage) for stage in self.batch_schedule.rampup])
        return state

    @property
    def worker_pids(self) -> list[int]:
        """Process ids; empty before the first step and without workers."""
        return self._workers.pids

    def close(self) -> None:
        """Stop prefetching; end the workers, then the threads, since a thread may wait for a worker that hangs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._workers.close()
        self._executor.shutdown(wait=True)
        self._workers.close()  # processes that the thread was about to start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count_holders(self, row_range: _RowRange) -> int:
        return min(row_range.rows, self._readers.count)

    def _read(self, row_range: _RowRange) -> Fields | None:
        """Read this reader's share, a contiguous run, so that it reads the same streams at each step.

        None if there are fewer rows than readers and this one gets none.
        """
        reader, n_readers = self._readers.rank, self._count_holders(row_range)
        if reader >= n_readers:
            return None
        begin, end = (row_range.first + row_range.rows * number // n_readers for number in (reader, reader + 1))
        return self._workers.read_rows(
            [None if self.end_position is not None and at >= self.end_position else at for at in range(begin, end)]
        )

    def _step(self, prefetched: _PrefetchedStep) -> tuple[list[Fields], float]:
        """Join the rows of all readers; return the micro-batches and the share of padding."""
        (first, n_rows, splits_per_row), local_rows = prefetched.row_range, _get_result_or_error(prefetched.read)
        if self._readers.count == 1:
            gathered = [local_rows]
        else:
            gathered = self._readers.all_gather(
                make_picklable_error(local_rows) if isinstance(local_rows, Exception) else local_rows,
                self._count_holders(prefetched.row_range),
            )
        for row_fields in (local_rows, *gathered):
            if isinstance(row_fields, Exception):
                raise row_fields
        fields = [row_fields for row_fields in gathered if isinstance(row_fields, dict)]
        rows = join_rows(fields) if len(fields) > 1 else fields[0]
        rows, positions = split_rows(rows, splits_per_row), np.arange(first, first + n_rows)
        keys = row_keys(self.rows.seed, positions)
        if splits_per_row > 1:
            keys = short_row_keys(
                self.rows.seed, np.repeat(positions, splits_per_row), np.tile(np.arange(splits_per_row), n_rows)
            )
        size = self.micro_batch * splits_per_row
        batch = {**rows, "keys": keys}
        step = [
            without_documents({name: field[start : start + size] for name, field in batch.items()})
            for start in range(0, n_rows * splits_per_row, size)
        ]
        return step, compute_padding_fraction(rows)


def _get_result_or_error(read: Future[Fields | None]) -> Fields | Exception | None:
    try:
        return read.result()
    except Exception as error:  # raised on all readers alike
        return error


def compute_padding_fraction(rows: Fields) -> float:
    """Return the share of padding in rows, over all sides."""
    document_ids = [field for name, field in rows.items() if name.endswith("documents")]
    return sum(int((documents == PAD_DOCUMENT_ID).sum()) for documents in document_ids) / sum(
        documents.size for documents in document_ids
    )


def without_documents(batch: Fields) -> Fields:
    """Drop the "documents" fields of a micro-batch if every row is one document from end to end.

    Attention then needs no document mask. All ranks that share the rows (tensor, pipeline and context parallelism) see
    the same micro-batch, so they decide alike. The check runs here, while rows are still on the host.
    """
    names = [name for name in batch if name.endswith("documents")]
    if any(batch[name].any() for name in names):
        return batch
    return {name: field for name, field in batch.items() if name not in names}


def split_rows(rows: Fields, splits_per_row: int) -> Fields:
    """Split rows [n, T, …] of one side into shorter ones, [n · splits_per_row, T / splits_per_row, …].

    Positions restart at 0 where a document is cut.
    """
    if splits_per_row == 1:
        return rows
    split = {
        name: field.reshape(field.shape[0] * splits_per_row, field.shape[1] // splits_per_row, *field.shape[2:])
        for name, field in rows.items()
    }
    documents, positions = split["documents"], split["positions"]
    is_token = documents != PAD_DOCUMENT_ID
    first = np.where(is_token, documents, np.iinfo(np.int64).max).min(axis=1, keepdims=True)
    is_first_document = is_token & (documents == documents[:, :1])
    split["positions"] = np.where(is_first_document, positions - positions[:, :1], positions)
    split["documents"] = np.where(is_token, documents - first, PAD_DOCUMENT_ID)
    return split
