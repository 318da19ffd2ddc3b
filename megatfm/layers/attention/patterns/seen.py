"""What a pattern lets a sequence's tokens see, as kernels ask for it."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from megatfm.layers.attention.patterns.pattern import AttentionPattern, block_bounds
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import BuiltinMask
from megatfm.ops.attention.bands import Band, bands

T = TypeVar("T")


class PatternMask:
    """A pattern over a sequence, for heads from `first_head` on, as kernels ask for it (`ops.attention.Visible`)."""

    def __init__(
        self, pattern: AttentionPattern, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1
    ) -> None:
        self._pattern, self._sequence = pattern.simplify(sequence.length), sequence
        self._heads = (first_head, n_heads) if pattern.differs_by_head else (0, 1)

    @property
    def builtin_mask(self) -> BuiltinMask | None:
        return self._pattern.builtin_mask if self._pattern.is_builtin(self._sequence) else None

    @property
    def grain(self) -> int | None:
        return self._pattern.block_size

    @property
    def window(self) -> tuple[int, int] | None:
        sequence = self._sequence
        alone = sequence.is_full_sequence and not sequence.cached_length and sequence.prefix_mask is None
        told = sequence.documents is None or sequence.cu_seqlens is not None
        return self._pattern.window if alone and told and not self._pattern.is_cross_attention else None

    def starts(self) -> Tensor:
        return self._sequence.uniform_cu_seqlens()

    def mask(self) -> Tensor | None:
        return self._sequence.mask(self._pattern, *self._heads)

    def block_mask(self, size: int) -> Tensor:
        return self._pattern.block_table(self._sequence, size, *self._heads)

    def full_block_mask(self, size: int) -> Tensor:
        return self._pattern.block_table(self._sequence, size, *self._heads, whole=True)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pattern, sequence = self._pattern, self._sequence
        of_q, of_k = pattern.places(sequence)
        row = b if len(of_q) > 1 else b * 0
        lengths = pattern.lengths(sequence).expand(len(of_q), of_q.shape[1])[row, q]
        seen = pattern.mask_mod_for_lengths(of_q[row, q], of_k[row, k], n + self._heads[0], lengths)
        if sequence.prefix_mask is not None:
            seen = seen | sequence.prefix_mask[b, k]
        numbers = sequence.document_ids(of_memory=pattern.is_cross_attention)
        return seen if numbers is None else seen & (numbers[0][b, q] == numbers[1][b, k])

    def translation_invariant_blocks(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Blocks of one document, in a pattern that distances say all of."""
        if (
            not (self._pattern.is_relative and self._sequence.is_full_sequence)
            or self._sequence.prefix_mask is not None
        ):
            return None
        numbers = self._sequence.document_ids(of_memory=self._pattern.is_cross_attention)
        if numbers is None:
            ones = self._sequence.indices.new_ones(1, 1).bool()
            q, k = len(self._sequence.indices), len(self._sequence.key_indices)
            return ones.expand(1, -(-q // size)), ones.expand(1, -(-k // size))
        of_q, of_k = (block_bounds(of, size, -1) for of in numbers)
        return (of_q.first == of_q.last)[:, 0, :, 0], (of_k.first == of_k.last)[:, 0, :, 0]

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """Of whole rows without a prefix: one tile after the other in each document."""
        sides, sequence = self._pattern.band, self._sequence
        whole = sequence.is_full_sequence and not sequence.cached_length and sequence.prefix_mask is None
        if sides is None or not whole or self._pattern.is_cross_attention:
            return None
        return bands(sides, sequence.document_spans(), sequence.indices.device, fused=fused)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached((key, self._pattern, self._heads), make)
