"""The interface of masks: what kernels ask of them, bands as one of their forms, and masks given as tensors."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from torch import Tensor

# B batch, N query heads, T queries, S keys

Made = TypeVar("Made")

BuiltinMask = Literal["all", "causal"]
"""Words that kernels have: all keys, or those up to the query itself, where the last query is also the last key."""


@dataclass(frozen=True)
class BandLimits:
    """A query sees all of its document from `left` tokens before it to `right` after it; None: from the first, to the
    last. chunk: and of these, those of its chunk of so many tokens, counted from the document's first. global_tokens:
    places of a document that see all of it, and are seen by all of it; ascending."""

    left: int | None
    right: int | None
    chunk: int | None = None
    global_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Band:
    """Tiles in one row of the batch, or in all (None), each `step` tokens after the one before: the first has `queries`
    from the place `first` on and `keys` from `start` on.

    partial_columns: by their first columns, what of the keys is not seen by all queries, boolean [b, ·]. causal: a
    single tile, whose i-th query sees keys up to the i-th. accumulates: of keys beside those that others have looked at
    for its queries.
    """

    row: int | None
    first: int
    start: int
    queries: int
    keys: int
    count: int = 1
    step: int = 1
    partial_columns: tuple[tuple[int, Tensor], ...] = ()
    causal: bool = False
    accumulates: bool = False

    def part(self, at: int, count: int) -> tuple[int, int, int]:
        """Return the first query and the first key of the tiles from number `at` on, and the number of tiles."""
        return self.first + at * self.step, self.start + at * self.step, min(count, self.count - at)


class AttentionMask(Protocol):
    """Pairs that attention sees. Each form is computed when a kernel asks for it: most need no mask of T × S."""

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        """The word that says all of it, where there is one."""

    @property
    def grain(self) -> int | None:
        """Tokens of the blocks that it is made of, where it is."""

    @property
    def window(self) -> tuple[int, int] | None:
        """Keys before and after its place that a query sees of its sequence, −1: all; None: no window says it all."""

    def starts(self) -> Tensor:
        """With a window: where sequences begin in all rows laid end to end, int32 [C + 1]; at last where they end."""

    def mask(self) -> Tensor | None:
        """Boolean [B or 1, N or 1, T, S], true where a query sees a key; None if `builtin_mask` says it all."""

    def block_mask(self, size: int) -> Tensor:
        """Boolean [B or 1, N or 1, ⌈T/size⌉, ⌈S/size⌉], true where a block of queries may see a key of a block."""

    def full_block_mask(self, size: int) -> Tensor:
        """Boolean, of the shape of `block_mask`, true if all queries of a block surely see all keys of a block."""

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Booleans for single pairs: int64 numbers of rows, heads, queries and keys that broadcast to one another."""

    def translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Blocks of queries [B or 1, ⌈T/size⌉] and of keys [B or 1, ⌈S/size⌉] such that what one of the first sees of
        some of the second depends on no more than how far from one another they are; None: there are none."""

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """All of it in tiles of neighbouring queries and keys; None: it is not of that form.

        fused: see `bands.bands`."""

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what all layers with this mask share; `make` is called the first time for each key."""


@dataclass(frozen=True)
class DenseMask:
    """A mask given by a word, a tensor, or a window and begins of documents."""

    builtin_mask: BuiltinMask | None = None
    dense: Tensor | None = None
    grain: int | None = None
    window: tuple[int, int] | None = None
    documents: Tensor | None = None

    def starts(self) -> Tensor:
        """The begins that were passed."""
        assert self.documents is not None
        return self.documents

    def mask(self) -> Tensor | None:
        return self.dense

    def block_mask(self, size: int) -> Tensor:
        """From the tensor."""
        return self._by_blocks(size, missing=False).any(5).any(3)

    def full_block_mask(self, size: int) -> Tensor:
        return self._by_blocks(size, missing=True).all(5).all(3)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert self.dense is not None
        return self.dense[b % len(self.dense), n % self.dense.shape[1], q, k]

    def translation_invariant_blocks(self, size: int) -> None:
        return None

    def bands(self, *, fused: bool) -> None:
        return None

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        return make()

    def _by_blocks(self, size: int, *, missing: bool) -> Tensor:
        assert self.dense is not None
        padded = self.dense.new_full(
            (*self.dense.shape[:2], *(-(-length // size) * size for length in self.dense.shape[2:])), missing
        )
        padded[..., : self.dense.shape[2], : self.dense.shape[3]] = self.dense
        return padded.unflatten(3, (-1, size)).unflatten(2, (-1, size))


FULL_MASK, CAUSAL_MASK = DenseMask("all"), DenseMask("causal")
