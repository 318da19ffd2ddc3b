"""The loader: which rows a data rank gets at each step, fetched ahead of time."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from megatfm.data.batch_schedule import BatchSchedule, nearest_batch, split_rows
from megatfm.data.packing import NO_DOCUMENT, Fields
from megatfm.data.rows import Rows
from megatfm.data.workers import Workers
from megatfm.errors import UsageError
from megatfm.keyed import part_keys, row_keys

STEPS_AHEAD = 2


class _Ahead(NamedTuple):
    global_batch: int
    step: Future[tuple[list[Fields], float]]


class Loader(Iterator[list[Fields]]):
    """Yields, step by step, this data rank's micro-batches: arrays [micro_batch, …] by name, as `Rows` gives them.

    Besides the rows' fields there is "keys" [micro_batch], a number ≥ 0 for each row that only its position and the
    seed decide, so that what is drawn from it depends on no rank, micro-batch or resume. There is no "documents" where
    every row of a micro-batch is one document from end to end.

    A step consumes `global_batch` positions of the order, from `position` on; a rank takes its contiguous
    slice of them. So the global batch of a step is the same for every number of ranks, and resuming is
    starting at the position and step that were reached. With a `BatchSchedule`, batch and sequence length
    depend on the step; a row that is cut into parts gives as many rows of a micro-batch. With `stop`, positions from
    there on are rows of padding, and iteration ends after the step that reaches it.

    Two threads fetch ahead, a step each, or one for which `workers` processes do the work; errors are raised here.
    Close the loader (or use `with`) when done. `waited` is the time in seconds that the consumer has waited for data,
    `step_tokens` what the last step of all ranks together had room for, `padding` which share of this rank's part of it
    was padding.

    Raises a UsageError if a global batch does not divide into micro-batches × data ranks.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        global_batch: int | BatchSchedule,
        micro_batch: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        position: int = 0,
        step: int = 0,
        stop: int | None = None,
        workers: int = 0,
    ) -> None:
        self.steps = global_batch if isinstance(global_batch, BatchSchedule) else BatchSchedule(global_batch)
        for batch in self.steps.batches:
            check_batch(batch, micro_batch, data_ranks)
        if any(stage.parts > 1 for stage in self.steps.warmup) and not rows.splits:
            raise UsageError(
                "data.warmup: this objective's sequences are whole, so rows can't be cut into shorter ones: leave "
                "sequence_length out of its stages"
            )
        self.rows = rows
        self.micro_batch = micro_batch
        self.position = position
        self.stop = stop
        self.waited, self.step_tokens, self.padding = 0.0, 0, 0.0
        self._rank, self._ranks = data_rank, data_ranks
        self._workers = Workers(rows, workers)
        # Two threads each make one of the steps ahead; a worker is asked by one.
        threads = 1 if workers else STEPS_AHEAD
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="megatfm-loader")
        self._ahead: deque[_Ahead] = deque()
        self._next_position, self._next_step = position, step

    def __next__(self) -> list[Fields]:
        self._fill()
        if not self._ahead:
            raise StopIteration
        start = perf_counter()
        step, self.padding = self._ahead[0].step.result()
        self.waited += perf_counter() - start
        taken = self._ahead.popleft().global_batch
        self.position += taken
        self.step_tokens = taken * self.rows.row_tokens
        self._fill()
        return step

    def _fill(self) -> None:
        """Have the next steps fetched."""
        while len(self._ahead) < STEPS_AHEAD and (self.stop is None or self._next_position < self.stop):
            stage = self.steps.stage(self._next_step)
            share = stage.global_batch // self._ranks
            first = self._next_position + self._rank * share
            fetched = self._executor.submit(self._fetch, first, share, stage.parts)
            self._ahead.append(_Ahead(stage.global_batch, fetched))
            self._next_position += stage.global_batch
            self._next_step += 1

    def state(self) -> dict[str, str | int | bool]:
        """The position up to which rows were consumed (not fetched), with what determines the order."""
        warmup = {"warmup": str([tuple(stage) for stage in self.steps.warmup])} if self.steps.warmup else {}
        epoch = self.rows.epoch(self.position)
        return {"position": self.position, "epoch": epoch, **self.rows.identity(), **warmup}

    @property
    def worker_pids(self) -> list[int]:
        """Process ids; empty before the first step and without workers."""
        return self._workers.pids

    def close(self) -> None:
        """Stop fetching, and end the thread and the workers."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, first: int, n: int, parts: int) -> tuple[list[Fields], float]:
        positions = np.arange(first, first + n)
        rows = self._workers.rows(
            [None if self.stop is not None and at >= self.stop else at for at in positions.tolist()]
        )
        rows = split_rows(rows, parts)
        keys = row_keys(self.rows.seed, positions)
        if parts > 1:
            keys = part_keys(self.rows.seed, np.repeat(positions, parts), np.tile(np.arange(parts), n))
        size = self.micro_batch * parts
        whole = {**rows, "keys": keys}
        step = [
            without_documents({name: field[start : start + size] for name, field in whole.items()})
            for start in range(0, n * parts, size)
        ]
        return step, padding_of(rows)


def padding_of(rows: Fields) -> float:
    """Which share of the places of rows, on all their sides, is padding."""
    numbers = [field for name, field in rows.items() if name.endswith("documents")]
    return sum(int((each == NO_DOCUMENT).sum()) for each in numbers) / sum(each.size for each in numbers)


def without_documents(batch: Fields) -> Fields:
    """A micro-batch; without document numbers where every row is one document from end to end.

    Attention then needs no mask. Whoever shares the rows (ranks of tensor, pipeline and context parallelism) reads the
    same micro-batch, and so does the same; it is decided here, where rows are still on the host.
    """
    numbers = [name for name in batch if name.endswith("documents")]
    if any(batch[name].any() for name in numbers):
        return batch
    return {name: field for name, field in batch.items() if name not in numbers}


def check_batch(global_batch: int, micro_batch: int, data_ranks: int) -> None:
    """Raise a UsageError, naming the nearest that does, unless the global batch divides."""
    unit = micro_batch * data_ranks
    if global_batch < 1 or global_batch % unit:
        raise UsageError(
            f"global batch {global_batch} does not divide into micro-batches of {micro_batch} × {data_ranks} "
            f"data ranks: the nearest that does is {nearest_batch(global_batch, unit)}"
        )
