"""What a pattern lets a sequence's tokens see, as kernels ask for it."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from megatfm.layers.attention.patterns.pattern import Pattern, span
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import Plain
from megatfm.ops.attention.bands import Band, bands

Made = TypeVar("Made")


class Seen:
    """A pattern over a sequence, for heads from `first_head` on, as kernels ask for it (`ops.attention.Visible`)."""

    def __init__(
        self, pattern: Pattern, sequence: SequenceMetadata, first_head: int = 0, n_heads: int = 1
    ) -> None:
        self._pattern, self._sequence = pattern.within(sequence.length), sequence
        self._heads = (first_head, n_heads) if pattern.differs_by_head else (0, 1)

    @property
    def plain(self) -> Plain | None:
        return self._pattern.plain if self._pattern.is_plain(self._sequence) else None

    @property
    def grain(self) -> int | None:
        return self._pattern.grain

    @property
    def window(self) -> tuple[int, int] | None:
        sequence = self._sequence
        alone = sequence.is_whole and not sequence.past and sequence.opened is None
        told = sequence.documents is None or sequence.starts is not None
        return self._pattern.window if alone and told and not self._pattern.of_memory else None

    def starts(self) -> Tensor:
        return self._sequence.row_starts()

    def mask(self) -> Tensor | None:
        return self._sequence.mask(self._pattern, *self._heads)

    def blocks(self, size: int) -> Tensor:
        return self._pattern.table(self._sequence, size, *self._heads)

    def whole(self, size: int) -> Tensor:
        return self._pattern.table(self._sequence, size, *self._heads, whole=True)

    def sees(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pattern, sequence = self._pattern, self._sequence
        of_q, of_k = pattern.places(sequence)
        row = b if len(of_q) > 1 else b * 0
        lengths = pattern.lengths(sequence).expand(len(of_q), of_q.shape[1])[row, q]
        seen = pattern.sees_of(of_q[row, q], of_k[row, k], n + self._heads[0], lengths)
        if sequence.opened is not None:
            seen = seen | sequence.opened[b, k]
        numbers = sequence.document_numbers(of_memory=pattern.of_memory)
        return seen if numbers is None else seen & (numbers[0][b, q] == numbers[1][b, k])

    def repeats(self, size: int) -> tuple[Tensor, Tensor] | None:
        """Blocks of one document, in a pattern that distances say all of."""
        if not (self._pattern.is_relative and self._sequence.is_whole) or self._sequence.opened is not None:
            return None
        numbers = self._sequence.document_numbers(of_memory=self._pattern.of_memory)
        if numbers is None:
            ones = self._sequence.indices.new_ones(1, 1).bool()
            q, k = len(self._sequence.indices), len(self._sequence.key_indices)
            return ones.expand(1, -(-q // size)), ones.expand(1, -(-k // size))
        of_q, of_k = (span(of, size, -1) for of in numbers)
        return (of_q.first == of_q.last)[:, 0, :, 0], (of_k.first == of_k.last)[:, 0, :, 0]

    def bands(self, *, fused: bool) -> Sequence[Band] | None:
        """Of whole rows without a prefix: one tile after the other in each document."""
        sides, sequence = self._pattern.sides, self._sequence
        whole = sequence.is_whole and not sequence.past and sequence.opened is None
        if sides is None or not whole or self._pattern.of_memory:
            return None
        return bands(sides, sequence.runs(), sequence.indices.device, fused=fused)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        return self._sequence.once((key, self._pattern, self._heads), make)
