"""How much of the order each step takes: a pure function of the step, also while batch and sequence length warm up."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatfm.data.packing import PAD_DOCUMENT_ID, Fields


class Stage(NamedTuple):
    """Some steps alike: `global_batch` positions of the order in each, every row cut into `parts` shorter ones."""

    steps: int
    global_batch: int
    splits_per_row: int = 1


@dataclass(frozen=True)
class BatchSchedule:
    """`warmup` stages, one after another, and then `global_batch` rows for ever."""

    global_batch: int
    warmup: tuple[Stage, ...] = ()

    def stage(self, step: int) -> Stage:
        """What the step (from 0) is like."""
        for stage in self.warmup:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return Stage(1, self.global_batch)

    def position(self, step: int) -> int:
        """The first position of a step (from 0), where nothing was skipped before."""
        position = 0
        for stage in self.warmup:
            taken = min(step, stage.steps)
            position, step = position + taken * stage.global_batch, step - taken
        return position + step * self.global_batch

    @property
    def batches(self) -> list[int]:
        """Every global batch that occurs."""
        return sorted({self.global_batch, *(stage.global_batch for stage in self.warmup)})


class Interleave(NamedTuple):
    """So many places are read in turn, so many rows of each."""

    streams: int
    turn: int = 1


def choose_interleave(global_batch: int, streams: int | None = None) -> Interleave:
    """Streams such that each slot of the batch always reads the same ones: the ranks, which divide the batch, then
    divide the streams, and none reads what another reads. More than 256 would overflow a lone rank's cache."""
    if streams is None and global_batch < 64:
        streams = global_batch * -(-64 // global_batch)
    if streams is None:
        streams = max(n for n in range(1, 257) if global_batch % n == 0)
    return Interleave(streams, max(1, global_batch // streams) if global_batch % streams == 0 else 1)


def split_rows(rows: Fields, parts: int) -> Fields:
    """Rows [n, T, …] of one side cut into [n·parts, T/parts, …]; where documents are cut, positions begin from 0."""
    if parts == 1:
        return rows
    cut = {
        name: field.reshape(field.shape[0] * parts, field.shape[1] // parts, *field.shape[2:])
        for name, field in rows.items()
    }
    documents, positions = cut["documents"], cut["positions"]
    real = documents != PAD_DOCUMENT_ID
    first = np.where(real, documents, np.iinfo(np.int64).max).min(axis=1, keepdims=True)
    same = real & (documents == documents[:, :1])
    cut["positions"] = np.where(same, positions - positions[:, :1], positions)
    cut["documents"] = np.where(real, documents - first, PAD_DOCUMENT_ID)
    return cut


def round_to_multiple(batch: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to a batch."""
    return max(1, (batch + unit // 2) // unit) * unit
