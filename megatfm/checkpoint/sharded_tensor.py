"""Sharded tensors: the block of a global tensor that one rank holds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatfm.errors import MegatfmError

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block inside a tensor."""

PIECE_BYTES = 64 * 2**20
"""A larger block is stored as several pieces of whole rows. Replicas then divide the writing of a large tensor, and a
reader holds little more than one file (see `writer.FILE_BYTES`) beside its tensors."""


def view_as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's memory as uint8 [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """The block of a global tensor that starts at `offsets` and has the shape of `tensor`.

    Any rank may hold any block, also an empty one. Equal blocks on several ranks are replicas, stored once. Together,
    the blocks of a name must fill the global shape without overlap. Raises MegatfmError for a block outside its tensor.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(self.tensor.shape)
        if not len(sizes) == len(self.global_shape) == len(self.offsets) or any(
            offset < 0 or offset + size > bound
            for size, bound, offset in zip(sizes, self.global_shape, self.offsets, strict=True)
        ):
            raise MegatfmError(
                f"a shard of shape {sizes} at {tuple(self.offsets)} lies outside "
                f"its tensor of shape {tuple(self.global_shape)}"
            )

    @property
    def blocks(self) -> Sequence["ShardedTensor"]:
        """The dense blocks that it consists of: itself."""
        return (self,)

    def with_tensor(self, tensor: Tensor) -> "ShardedTensor":
        """Return the same block with another tensor of the same shape."""
        return self if tensor is self.tensor else ShardedTensor(tensor, self.global_shape, self.offsets)

    @classmethod
    def from_tensor(cls, tensor: "ShardedTensor | Tensor") -> "ShardedTensor":
        """Wrap a plain tensor as a single block; a sharded tensor is returned unchanged. Raises MegatfmError for a
        DTensor."""
        if isinstance(tensor, ShardedTensor):
            return tensor
        if isinstance(tensor, DTensor):
            raise MegatfmError("a DTensor can't be stored as it is: wrap its local tensor into a ShardedTensor")
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def list_pieces(self) -> list[Region]:
        """Return the regions that are stored separately: whole rows, of at most `PIECE_BYTES` unless one row is
        larger."""
        sizes = tuple(self.tensor.shape)
        if prod(self.global_shape) == 0:  # one entry, so that the name and the shape are kept
            return [((0,) * len(sizes), tuple(self.global_shape))]
        if self.tensor.numel() == 0:
            return []
        if not sizes:
            return [((), ())]
        rows = max(1, PIECE_BYTES * sizes[0] // self.tensor.nbytes)
        return [
            ((self.offsets[0] + start, *self.offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:]))
            for start in range(0, sizes[0], rows)
        ]

    def view_piece(self, region: Region) -> Tensor:
        """Return one of its pieces, a view of this block's memory."""
        tensor, (offsets, sizes) = self.tensor.detach(), region
        if prod(self.global_shape) == 0:
            return tensor.new_empty(self.global_shape)
        return tensor.narrow(0, offsets[0] - self.offsets[0], sizes[0]) if sizes else tensor


@dataclass(frozen=True, eq=False)
class FlatShardedTensor(ShardedTensor):
    """Consecutive elements of a flattened block of a global tensor, for engines that shard flat tensors.

    tensor: [elements]. offsets, block_shape: of the block. flat_start: index in the flattened block of the first
    element. It is stored and read as the few dense blocks that the elements cover, which are views of `tensor`.
    """

    block_shape: tuple[int, ...]
    flat_start: int

    def __post_init__(self) -> None:
        if not (self.tensor.dim() == 1 and 0 <= self.flat_start <= prod(self.block_shape) - self.tensor.numel()):
            raise MegatfmError(
                f"{self.tensor.numel()} elements from {self.flat_start} on lie outside a block of shape "
                f"{self.block_shape}"
            )

    @cached_property
    def blocks(self) -> Sequence[ShardedTensor]:
        """The dense blocks that the elements cover."""
        return tuple(
            ShardedTensor(
                self.tensor[start : start + prod(sizes)].view(sizes),
                self.global_shape,
                tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)),
            )
            for offsets, sizes, start in _iter_dense_blocks(
                self.block_shape, self.flat_start, self.flat_start + self.tensor.numel()
            )
        )

    def with_tensor(self, tensor: Tensor) -> "FlatShardedTensor":
        """Return the same block with another tensor of the same shape."""
        return FlatShardedTensor(tensor, self.global_shape, self.offsets, self.block_shape, self.flat_start)

    def list_pieces(self) -> list[Region]:
        """Return the pieces of all of its blocks."""
        return [piece for block in self.blocks for piece in block.list_pieces()]

    def view_piece(self, region: Region) -> Tensor:
        """Return one of its pieces, a view of this block's memory."""
        for block in self.blocks:
            if region in block.list_pieces():
                return block.view_piece(region)
        raise MegatfmError(f"no piece begins at {region[0]}")


def _iter_dense_blocks(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the dense blocks that elements [first, last) of a flattened tensor cover: complete rows as one block, and
    the blocks of the incomplete rows before and after them.

    Yields offsets, sizes, and the start of the block's elements, counted from `first`.
    """
    if first == last:
        return
    if len(shape) <= 1:
        yield (first,) * len(shape), (last - first,) * len(shape), 0
        return
    row_size = prod(shape[1:])
    begin, end = -(-first // row_size), last // row_size  # rows [begin, end) are complete
    if begin > end:  # within one row
        for offsets, sizes, start in _iter_dense_blocks(shape[1:], first - end * row_size, last - end * row_size):
            yield (end, *offsets), (1, *sizes), start
        return
    for offsets, sizes, start in _iter_dense_blocks(shape[1:], first % row_size, row_size) if first % row_size else ():
        yield (begin - 1, *offsets), (1, *sizes), start
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]), begin * row_size - first
    for offsets, sizes, start in _iter_dense_blocks(shape[1:], 0, last - end * row_size):
        yield (end, *offsets), (1, *sizes), end * row_size - first + start


def check_cover(name: str, shape: Sequence[int], pieces: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Raise MegatfmError unless the pieces (offsets, sizes) lie inside a tensor of `shape` and hold each element
    once."""
    regions = sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in pieces)
    for offsets, sizes in regions:
        if not len(shape) == len(offsets) == len(sizes) or any(
            offset + size > bound for offset, size, bound in zip(offsets, sizes, shape, strict=True)
        ):
            raise MegatfmError(
                f"tensor {name}: a piece of shape {tuple(sizes)} at {tuple(offsets)} lies outside "
                f"its shape {tuple(shape)}"
            )
    if _is_grid(shape, regions):
        return
    n_elements = sum(prod(sizes) for _, sizes in regions)
    if n_elements != prod(shape):
        raise MegatfmError(
            f"tensor {name}: the pieces hold {n_elements} elements, but its shape {tuple(shape)} has {prod(shape)}: "
            "a part is missing or held twice"
        )
    # Pieces are sorted by their first row: one can only overlap earlier pieces that end after it.
    open_regions: list[Region] = []
    for offsets, sizes in regions if shape else []:
        open_regions = [region for region in open_regions if region[0][0] + region[1][0] > offsets[0]]
        for open_offsets, open_sizes in open_regions:
            if all(
                a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, open_offsets, open_sizes, strict=True)
            ):
                raise MegatfmError(f"tensor {name}: the pieces at {tuple(open_offsets)} and {tuple(offsets)} overlap")
        open_regions.append((offsets, sizes))


def _is_grid(shape: Sequence[int], pieces: Sequence[Region]) -> bool:
    """Return whether the pieces are all cells of a grid, which divides each dim into intervals."""
    n_cells = 1
    for dim, bound in enumerate(shape):
        end, intervals = 0, sorted({(offsets[dim], sizes[dim]) for offsets, sizes in pieces})
        for start, size in intervals:
            if start != end:
                return False
            end += size
        if end != bound:
            return False
        n_cells *= len(intervals)
    return len(pieces) == n_cells == len(set(pieces))
