"""Tensors packed into one buffer, so that one collective moves many of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

BUCKET_ELEMENTS = 2**24
"""Enough for a network to run at its full rate, little enough to lie beside the gradients (64 MB in float32)."""


@dataclass(frozen=True)
class Bucket:
    """Tensors whose rows are dealt out to `ranks`: ⌈rows / ranks⌉ to each, the last ones fewer or none.

    The buffer is [ranks, width]; row r holds what rank r keeps, filled up with zeros.
    """

    shapes: Mapping[str, Sequence[int]]
    ranks: int

    def rows(self, name: str, rank: int) -> tuple[int, int]:
        """The first row that a rank keeps, and how many."""
        n_rows = self.shapes[name][0]
        each = -(-n_rows // self.ranks)
        first = min(each * rank, n_rows)
        return first, min(each, n_rows - first)

    def pack(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Whole tensors → the buffer; one that is missing counts as zeros. like: of the buffer's dtype and device."""
        buffer = like.new_empty(self.ranks, self.width)
        for name, start, size in self._columns:
            if name not in tensors:
                buffer[:, start : start + size] = 0
                continue
            rows = tensors[name].reshape(self.shapes[name][0], -1)
            for rank in range(self.ranks):
                first, count = self.rows(name, rank)
                _fill(buffer[rank, start : start + size], rows[first : first + count])
        return buffer

    def pack_shard(self, blocks: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The rows that this rank keeps → its row of the buffer [width]."""
        row = like.new_empty(self.width)
        for name, start, size in self._columns:
            _fill(row[start : start + size], blocks[name])
        return row

    def unpack(self, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """The buffer → whole tensors, in place."""
        for name, start, size in self._columns:
            rows = tensors[name].view(self.shapes[name][0], -1)
            for rank in range(self.ranks):
                first, count = self.rows(name, rank)
                part = rows[first : first + count]
                part.copy_(buffer[rank, start : start + size][: part.numel()].view_as(part))

    def unpack_shard(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Row [width] of a rank → views of the rows that it keeps."""
        blocks = {}
        for name, start, _ in self._columns:
            shape = (self.rows(name, rank)[1], *self.shapes[name][1:])
            blocks[name] = row[start : start + torch.Size(shape).numel()].view(shape)
        return blocks

    @property
    def width(self) -> int:
        """Elements that each rank has in the buffer, those that pad it included."""
        return sum(size for _, _, size in self._columns)

    @cached_property
    def _columns(self) -> list[tuple[str, int, int]]:
        """Name, start and size of what each tensor takes in a row of the buffer."""
        columns, start = [], 0
        for name in self.shapes:
            size = self.rows(name, 0)[1] * torch.Size(self.shapes[name][1:]).numel()
            columns.append((name, start, size))
            start += size
        return columns


def _fill(room: Tensor, part: Tensor) -> None:
    """Put a part at the beginning of a room, and zeros into what is left of it: most often nothing, and to write them
    everywhere first is half as much again."""
    room[: part.numel()] = part.reshape(-1)
    if part.numel() < room.numel():
        room[part.numel() :] = 0


def assign_buckets(shapes: Mapping[str, Sequence[int]], ranks: int, most: int) -> Iterator[Bucket]:
    """Buckets of neighbouring tensors, each of at most so many elements or of one tensor."""
    bucket: dict[str, Sequence[int]] = {}
    filled = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if bucket and filled + size > most:
            yield Bucket(bucket, ranks)
            bucket, filled = {}, 0
        bucket[name] = shape
        filled += size
    if bucket:
        yield Bucket(bucket, ranks)


def reduce_scatter(buffer: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[ranks, width] → [width], this rank's row of the sum over the ranks, and what to wait for before it is used."""
    row = buffer.new_empty(buffer.shape[1])
    return row, group._reduce_scatter_base(row, buffer.view(-1), dist.ReduceScatterOptions())


def all_gather(row: Tensor, ranks: int, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[width] of each rank → [ranks, width], and what to wait for before it is used."""
    buffer = row.new_empty(ranks, row.numel())
    return buffer, group._allgather_base(buffer.view(-1), row)
