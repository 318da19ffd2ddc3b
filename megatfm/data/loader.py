"""The loader: which rows a data rank gets at each step, fetched ahead of time."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np

from megatfm.data.order import PackedRows
from megatfm.data.packing import Fields
from megatfm.errors import UsageError
from megatfm.keyed import row_keys

STEPS_AHEAD = 2


class Loader(Iterator[list[Fields]]):
    """Yields, step by step, this data rank's micro-batches: int64 arrays [micro_batch, sequence] by name.

    Besides the rows' fields there is "keys" [micro_batch], a number ≥ 0 for each row that only its position and the
    seed decide, so that what is drawn from it depends on no rank, micro-batch or resume.

    A step consumes `global_batch` positions of the order, from `position` on; a rank takes its contiguous
    slice of them. So the global batch of a step is the same for every number of ranks, and resuming is
    starting at the position that `state()` gave. With `stop`, positions from there on are rows of padding,
    and iteration ends after the step that reaches it.

    One thread fetches ahead; its errors are raised here. Close the loader (or use `with`) when done.
    `waited` is the time in seconds that the consumer has waited for data.

    Raises a UsageError if the global batch does not divide into micro-batches × data ranks.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        position: int = 0,
        stop: int | None = None,
    ) -> None:
        check_batch(global_batch, micro_batch, data_ranks)
        self.rows = rows
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.position = position
        self.stop = stop
        self.waited = 0.0
        share = global_batch // data_ranks
        self._slice = range(data_rank * share, (data_rank + 1) * share)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatfm-loader")
        self._ahead: deque[Future[list[Fields]]] = deque()
        self._next_fetch = position

    def __next__(self) -> list[Fields]:
        while len(self._ahead) < STEPS_AHEAD and (self.stop is None or self._next_fetch < self.stop):
            self._ahead.append(self._executor.submit(self._fetch, self._next_fetch))
            self._next_fetch += self.global_batch
        if not self._ahead:
            raise StopIteration
        start = perf_counter()
        step = self._ahead[0].result()
        self.waited += perf_counter() - start
        self._ahead.popleft()
        self.position += self.global_batch
        return step

    def state(self) -> dict[str, str | int | bool]:
        """The position up to which rows were consumed (not fetched), with what determines the order."""
        return {"position": self.position, "epoch": self.position // len(self.rows), **self.rows.identity()}

    def close(self) -> None:
        """Stop fetching and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, position: int) -> list[Fields]:
        positions = np.arange(position + self._slice.start, position + self._slice.stop)
        rows, keys = [self._row(at) for at in positions.tolist()], row_keys(self.rows.seed, positions)
        cut = (slice(start, start + self.micro_batch) for start in range(0, len(rows), self.micro_batch))
        return [{**_stacked(rows[part]), "keys": keys[part]} for part in cut]

    def _row(self, position: int) -> Fields:
        return (
            self.rows.padding()
            if self.stop is not None and position >= self.stop
            else self.rows.row(position)
        )


def check_batch(global_batch: int, micro_batch: int, data_ranks: int) -> None:
    """Raise a UsageError, naming the nearest that does, unless the global batch divides."""
    unit = micro_batch * data_ranks
    if global_batch < 1 or global_batch % unit:
        nearest = max(1, (global_batch + unit // 2) // unit) * unit
        raise UsageError(
            f"global batch {global_batch} does not divide into micro-batches of {micro_batch} × {data_ranks} "
            f"data ranks: the nearest that does is {nearest}"
        )


def _stacked(rows: list[Fields]) -> Fields:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
