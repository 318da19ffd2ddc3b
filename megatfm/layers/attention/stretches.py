"""Stretches of a document's tokens that become one key each: where they stand, and what sees them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatfm.layers.part import SequenceShard
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import BuiltinMask

# B batch, T queries, S stretches, F tokens of one

T = TypeVar("T")

NO_POSITION = 2**62
"""The place of a stretch that a row does not have, where others have more: later than all queries."""


@dataclass(frozen=True)
class CompressedBlocks:
    """places int64 [B or 1, S]: where in its row the token stands that comes after a stretch; `first`: or that is the
    document's first, and alone.

    tokens int64 [B or 1, S, F]: numbers of its tokens among those that are here; here: booleans, whether they are.
    """

    places: Tensor
    first: Tensor
    tokens: Tensor
    here: Tensor


def compress_blocks(sequence: SequenceMetadata, factor: int, new: int | None = None) -> CompressedBlocks:
    """Stretches of documents, F tokens each from the first one on. new: only those that stand at one of so many last
    tokens. A stretch that nothing comes after is left out."""
    row = sequence.full_sequence if isinstance(sequence, SequenceShard) else sequence
    return sequence.cached(("stretches", factor, new), lambda: _stretches(sequence, row, factor, new))


def _stretches(
    sequence: SequenceMetadata, row: SequenceMetadata, factor: int, new: int | None
) -> CompressedBlocks:
    places_BT, index_T = row.positions_in_document()[1], row.key_indices
    old = 0 if new is None or row is not sequence else len(index_T) - new
    stands_BT = places_BT[:, old:] % factor == 0
    if row.document_ids() is None:
        at_BS = stands_BT[0].nonzero()[None, :, 0] if old or row.cached_length else _every(factor, places_BT)
        has_BS = torch.ones_like(at_BS, dtype=torch.bool)
    else:
        count_B = stands_BT.sum(1)
        known_BT = row.on_host().positions_in_document()[1][:, old:]
        most = int((known_BT % factor == 0).sum(1).max())
        at_BS = stands_BT.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        has_BS = torch.arange(at_BS.shape[1], device=at_BS.device) < count_B[:, None]
    at_BS = at_BS + old
    first_BS = (places_BT.gather(1, at_BS) == 0) & has_BS
    inside_F = torch.arange(factor, device=at_BS.device)
    tokens_BSF = at_BS[..., None] - factor * ~first_BS[..., None] + inside_F
    here_BSF = has_BS[..., None] & ~(first_BS[..., None] & (inside_F > 0)) & (tokens_BSF >= 0)
    tokens_BSF = tokens_BSF.clamp(0, len(index_T) - 1)
    if isinstance(sequence, SequenceShard):
        held_T = torch.full_like(index_T, -1)
        held_T[sequence.token_indices] = torch.arange(len(sequence.token_indices), device=index_T.device)
        tokens_BSF = held_T[tokens_BSF]
        here_BSF, tokens_BSF = here_BSF & (tokens_BSF >= 0), tokens_BSF.clamp(min=0)
    places_BS = index_T[at_BS].where(has_BS, NO_POSITION)
    return CompressedBlocks(places_BS, first_BS, tokens_BSF, here_BSF)


def _every(factor: int, places_1T: Tensor) -> Tensor:
    """[1, S]: known without a look at the tokens."""
    return torch.arange(0, places_1T.shape[1], factor, device=places_1T.device)[None]


class CompressedKeyMask:
    """Stretches that stand no later than the query, in its document: a `AttentionMask` of `ops.attention`."""

    builtin_mask: BuiltinMask | None = None
    grain: int | None = None
    window: tuple[int, int] | None = None

    def __init__(self, sequence: SequenceMetadata, places_BS: Tensor, factor: int) -> None:
        self._sequence, self._places, self._factor = sequence, places_BS, factor

    def mask(self) -> Tensor:
        return self.cached("mask", self._mask)

    def _mask(self) -> Tensor:
        of_q, of_k = self._documents()
        near = self._places[:, None, None] <= self._sequence.indices[None, None, :, None]
        return near & (of_q[:, None, :, None] == of_k[:, None, None])

    def block_mask(self, size: int) -> Tensor:
        return self._table(size, whole=False)

    def full_block_mask(self, size: int) -> Tensor:
        return self._table(size, whole=True)

    def _table(self, size: int, *, whole: bool) -> Tensor:
        """Stretches stand in order, and documents too: what a row does not have is last, and in none."""
        (q_first, q_last), (k_first, k_last) = (
            _ends(x, size, dim) for x, dim in ((self._sequence.indices[None], -1), (self._places, -2))
        )
        documents_q, documents_k = self._documents()
        (of_q, of_q_last), (of_k, of_k_last) = _ends(documents_q, size, -1), _ends(documents_k, size, -2)
        if whole:
            same = (of_q == of_q_last) & (of_k == of_k_last) & (of_q == of_k)
            return (k_last <= q_first) & same
        return (k_first <= q_last) & (of_k <= of_q_last) & (of_k_last >= of_q)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_q, of_k = self._documents()
        rows = b % len(self._places)
        near = self._places[rows, k] <= self._sequence.indices[q]
        return near & (of_q[b % len(of_q), q] == of_k[b % len(of_k), k])

    def translation_invariant_blocks(self, size: int) -> None:
        return None

    def starts(self) -> Tensor:
        """Nobody asks, without a window."""
        raise NotImplementedError

    def bands(self, *, fused: bool) -> None:
        return None

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached(("stretches", key, self._factor), make)

    def _documents(self) -> tuple[Tensor, Tensor]:
        return self.cached("documents", self._numbered)

    def _numbered(self) -> tuple[Tensor, Tensor]:
        """Of queries [B or 1, T] and stretches [B or 1, S]: how many documents begin in the row before theirs ends."""
        sequence = self._sequence
        row = sequence.full_sequence if isinstance(sequence, SequenceShard) else sequence
        places_BT = row.positions_in_document()[1]
        if row.document_ids() is None:
            return sequence.indices.new_zeros(1, len(sequence.indices)), torch.zeros_like(self._places[:1])
        starts_BT = (places_BT == 0).cumsum(1)
        starts_BT = starts_BT.expand(max(len(starts_BT), len(self._places)), -1)
        has_BS = self._places < NO_POSITION
        of_k = starts_BT.gather(1, self._places.where(has_BS, 0)).where(has_BS, NO_POSITION)
        return starts_BT[:, sequence.indices], of_k


def _ends(values: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each block [B or 1, 1, ·, 1] or [B or 1, 1, 1, ·]."""
    missing = -values.shape[1] % size
    blocks = torch.cat([values, values[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))
    return blocks.amin(-1)[:, None].unsqueeze(dim), blocks.amax(-1)[:, None].unsqueeze(dim)
