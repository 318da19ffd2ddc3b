"""Masks of attention, their bands of tiles, dense masks, and biases by distance, which are added to scores.

A relative bias (ALiBi, T5) has one value a distance, not a pair, [N, T + S − 1]: query i of T and key j of S get value
j − i + T − 1. For queries and keys that are some of a row's L tokens it is that of the row, [N, 2L − 1], and i and j
are indices in the row.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, N query heads, T queries, S keys, R query blocks, n heads that differ (or 1), b queries and M keys of a tile

T = TypeVar("T")

BuiltinMask = Literal["all", "causal"]
"""Masks that kernels have built in: all keys, or the keys up to the query, with the last query at the last key."""


@dataclass(frozen=True)
class BandLimits:
    """Band of keys that a query sees in its document: from `left` tokens before it to `right` after it; None: no limit.

    chunk: only keys in the query's chunk of so many tokens, counted from the document's start. global_tokens: positions
    in a document, ascending, that see all of it and are seen by all of it.
    """

    left: int | None
    right: int | None
    chunk: int | None = None
    global_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Band:
    """Equal tiles of pairs, each `step` tokens after the previous one, in one row of the batch (None: in all rows).

    The first tile has `queries` from `first_query` on and `keys` from `first_key` on; there are `count` tiles.
    partial_columns: (first column, boolean mask [b, ·]) of keys that not all queries of a tile see. causal: a single
    tile, whose i-th query sees keys up to the i-th. accumulates: other bands have visited other keys for its queries.
    """

    row: int | None
    first_query: int
    first_key: int
    queries: int
    keys: int
    count: int = 1
    step: int = 1
    partial_columns: tuple[tuple[int, Tensor], ...] = ()
    causal: bool = False
    accumulates: bool = False

    def tile_range(self, index: int, count: int) -> tuple[int, int, int]:
        """Return first query, first key and number of at most `count` tiles from the tile `index` on."""
        offset = index * self.step
        return self.first_query + offset, self.first_key + offset, min(count, self.count - index)


@dataclass(frozen=True)
class DocumentSpans:
    """Row, start and end of each document, padding included. causal: a query sees no later keys of its document."""

    spans: Sequence[tuple[int, int, int]]
    causal: bool


class AttentionMask(Protocol):
    """Query-key pairs that attention sees. Each form is computed on use: most kernels need no mask of T × S."""

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        """The built-in mask that is equal to this one; None if there is none."""

    @property
    def block_size(self) -> int | None:
        """Tokens of the blocks that the mask consists of; None if it has no blocks."""

    @property
    def window(self) -> tuple[int, int] | None:
        """Number of keys before and after a query that it sees of its document, −1: all; None if no window is equal."""

    def cu_seqlens(self) -> Tensor:
        """Return cumulative lengths of documents in all rows laid end to end, int32 [C + 1].

        Only for masks with a window.
        """

    def mask(self) -> Tensor | None:
        """Return boolean [B or 1, N or 1, T, S], true where a query sees a key; None if `builtin_mask` is equal."""

    def block_mask(self, size: int) -> Tensor:
        """Return boolean [B or 1, N or 1, ⌈T/size⌉, ⌈S/size⌉], true where a block of queries may see a key of a
        block."""

    def full_block_mask(self, size: int) -> Tensor:
        """Return booleans of the shape of `block_mask`, true only if all queries of a block see all keys of a block."""

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return booleans of single pairs.

        b, n, q, k: int64 indices of rows, heads, queries and keys, which broadcast.
        """

    def find_translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Return booleans of query blocks [B or 1, ⌈T/size⌉] and key blocks [B or 1, ⌈S/size⌉] for which the mask of a
        pair depends only on their distance; None: there are none."""

    def document_spans(self) -> DocumentSpans | None:
        """Return the documents of packed rows, if queries see all keys of their document, or all that are not later.

        None for other masks, if each row is one document, and for a part of a row.
        """

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """Return the mask as bands of tiles; None if it has no such form. fused: see `bands.make_bands`."""

    def shard_bands(self) -> Sequence[Band] | None:
        """Return the mask of some queries and keys as bands that are fully visible or causal squares; None if it has no
        such form."""

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value that all layers with this mask share; `make` is called once for each key."""


class UnstructuredMask:
    """Base of masks without a window, repeated blocks, document spans and bands."""

    builtin_mask: BuiltinMask | None = None
    block_size: int | None = None
    window: tuple[int, int] | None = None

    def cu_seqlens(self) -> Tensor:
        """Raises NotImplementedError: this mask has no window."""
        raise NotImplementedError

    def find_translation_invariant_blocks(self, size: int) -> None:
        """Return None: there are none."""

    def document_spans(self) -> None:
        """Return None: the mask is not known by documents."""

    def bands(self, *, fused: bool) -> None:
        """Return None: the mask has no such form."""

    def shard_bands(self) -> None:
        """Return None: the mask has no such form."""


@dataclass(frozen=True)
class DenseMask(UnstructuredMask):
    """A mask from a built-in one or a boolean tensor [B or 1, N or 1, T, S]."""

    builtin_mask: BuiltinMask | None = None
    dense: Tensor | None = None
    block_size: int | None = None

    def mask(self) -> Tensor | None:
        return self.dense

    def block_mask(self, size: int) -> Tensor:
        return self._to_blocks(size, fill=False).any(5).any(3)

    def full_block_mask(self, size: int) -> Tensor:
        return self._to_blocks(size, fill=True).all(5).all(3)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert self.dense is not None
        return self.dense[b % len(self.dense), n % self.dense.shape[1], q, k]

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return make()

    def _to_blocks(self, size: int, *, fill: bool) -> Tensor:
        assert self.dense is not None
        padded = self.dense.new_full(
            (*self.dense.shape[:2], *(-(-length // size) * size for length in self.dense.shape[2:])), fill
        )
        padded[..., : self.dense.shape[2], : self.dense.shape[3]] = self.dense
        return padded.unflatten(3, (-1, size)).unflatten(2, (-1, size))


FULL_MASK, CAUSAL_MASK = DenseMask("all"), DenseMask("causal")


def is_relative(bias: Tensor | None) -> bool:
    """Return whether a bias is relative, not one of all pairs."""
    return bias is not None and bias.dim() == 2


def expand_bias(bias: Tensor, keys: int) -> Tensor:
    """Return a bias of all pairs [N, T, S] from either form."""
    return bias.unfold(-1, keys, 1).flip(-2) if is_relative(bias) else bias


def slice_last_keys(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Return the bias of the last keys, in either form."""
    return bias[..., -(queries + keys - 1) :] if is_relative(bias) else bias[..., -keys:]


def slice_tile(bias_NL: Tensor, total: int, first: int, queries: int, start: int, keys: int) -> Tensor:
    """Return the bias [N, b, M] of queries from `first` of `total` on and keys from `start` on."""
    column = start - first - queries + total
    return bias_NL[:, column : column + queries + keys - 1].unfold(-1, keys, 1).flip(-2)


def add_tile_gradient(total_NL: Tensor, part_NbM: Tensor, total: int, first: int, start: int) -> None:
    """Add the gradient of `slice_tile`'s result to that of the relative bias, in place."""
    heads, queries, keys = part_NbM.shape
    padded = part_NbM.new_zeros(heads, queries, keys + queries)
    padded[..., :keys] = part_NbM.flip(-2)
    # Viewed with rows one shorter, each row is shifted by one, so that equal distances share a column.
    columns = keys + queries - 1
    shifted = padded.flatten(1)[:, : queries * columns].unflatten(1, (queries, -1))
    column = start - first - queries + total
    total_NL[:, column : column + columns] += shifted.sum(1)


def compute_block_indices(
    length: int,
    zero_distance: int,
    size: int,
    query_blocks: Tensor,
    key_blocks: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> Tensor:
    """Return indices int64 [R, n, b, M·b] in a relative bias of `length`, for query blocks [R] and key blocks [R, n,
    M].

    zero_distance: index of distance 0. q_positions [T], k_positions [S]: indices in the row; None: from 0 on. Indices
    of padding tokens are arbitrary.
    """
    q = find_block_positions(q_positions, query_blocks, size)[:, None, :, None]
    k = find_block_positions(k_positions, key_blocks, size).flatten(2)[:, :, None]
    return (k - q + zero_distance).clamp_(0, length - 1)


def find_block_positions(positions: Tensor | None, blocks: Tensor, size: int) -> Tensor:
    """Return the positions [·, b] of the tokens of blocks with indices [·]; arbitrary ones beyond the last token."""
    tokens = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return tokens if positions is None else F.pad(positions, (0, -len(positions) % size))[tokens]
