"""What queries see of keys, as kernels ask for it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from megatfm.ops.attention.bands import Band

# B batch, N query heads, T queries, S keys

Made = TypeVar("Made")

BuiltinMask = Literal["all", "causal"]
"""Words that kernels have: all keys, or those up to the query itself, where the last query is also the last key."""


class AttentionMask(Protocol):
    """What is seen. Each form of it is made when a kernel asks for it: most do without a mask of T × S."""

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        """The word that says all of it, where there is one."""

    @property
    def grain(self) -> int | None:
        """Tokens of the blocks that it is made of, where it is."""

    @property
    def window(self) -> tuple[int, int] | None:
        """How many keys before and after its own place a query sees of its sequence, −1: all; None: that is not all."""

    def starts(self) -> Tensor:
        """With a window: where sequences begin in all rows laid end to end, int32 [C + 1]; at last where they end."""

    def mask(self) -> Tensor | None:
        """Boolean [B or 1, N or 1, T, S], true where a query looks; None where `plain` says it."""

    def block_mask(self, size: int) -> Tensor:
        """Boolean [B or 1, N or 1, ⌈T/size⌉, ⌈S/size⌉], true where a block of queries may see a key of a block."""

    def full_block_mask(self, size: int) -> Tensor:
        """The same, true where all of a block of queries surely see all keys of a block."""

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Booleans for single pairs: int64 numbers of rows, heads, queries and keys that broadcast to one another."""

    def translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Blocks of queries [B or 1, ⌈T/size⌉] and of keys [B or 1, ⌈S/size⌉] such that what one of the first sees of
        some of the second depends on no more than how far from one another they are; None: there are none."""

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """All of it in tiles of neighbouring queries and keys; None: it is not of that form.

        fused: see `bands.bands`."""

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What all layers that see the same share, made at the first call."""


@dataclass(frozen=True)
class DenseMask:
    """What is seen, by a word or by a mask, or by a window and where documents start."""

    builtin_mask: BuiltinMask | None = None
    dense: Tensor | None = None
    grain: int | None = None
    window: tuple[int, int] | None = None
    documents: Tensor | None = None

    def starts(self) -> Tensor:
        """As they were given."""
        assert self.documents is not None
        return self.documents

    def mask(self) -> Tensor | None:
        return self.dense

    def block_mask(self, size: int) -> Tensor:
        """Of a mask."""
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
