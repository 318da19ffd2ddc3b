"""Where the tokens of a batch stand: what attention and position encodings need to know about a sequence."""

import copy
from collections.abc import Callable, Hashable
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from megatfm.ops.dropout import mix

# B batch, T queries, S keys

Made = TypeVar("Made")

Sight = Literal["causal", "full", "cross"]
"""What a query may look at: earlier tokens (and its document's prefix), all tokens, or the memory's tokens; in each
case only those of its own document."""

NO_TARGET = -100


class SequenceLayout:
    """Positions, document boundaries, prefixes and random keys of a batch.

    positions: int64 [B, T], the position of each token in its document. documents: int64 [B, T] or None; tokens see
    one another only inside one document, and −1 marks padding. prefix: bool [B, T] or None, tokens that all of their
    document sees. keys: int64 [B], on which dropout depends. past: number of tokens in the key-value cache before
    these; past_documents [B, past]: theirs. memory: the layout of what cross-attention looks at.

    Tokens of one document stand next to one another, so that distances in a document are distances in the row.
    """

    def __init__(
        self,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
        keys: Tensor | None = None,
        past: int = 0,
        past_documents: Tensor | None = None,
        memory: "SequenceLayout | None" = None,
    ) -> None:
        self.positions, self.documents, self.prefix, self.keys = positions, documents, prefix, keys
        self.past, self.past_documents, self.memory = past, past_documents, memory
        self.skip_rate: Tensor | None = None
        """Of the layer at hand, a scalar: how often stochastic depth leaves a sublayer out; None: never."""
        self._made: dict[Hashable, object] = {}

    def at_layer(self, depth: int, skip_rate: float = 0.0) -> Self:
        """The same for one layer: its own random keys, everything else shared."""
        if self.keys is None:
            return self
        layer = copy.copy(self)
        layer.keys = mix(self.keys, depth + 1)
        if skip_rate:
            layer.skip_rate = torch.tensor(skip_rate, dtype=torch.float64, device=self.keys.device)
        return layer

    @property
    def indices(self) -> Tensor:
        """The places [T] of the tokens in their rows."""
        return self.once(
            "indices",
            lambda: torch.arange(
                self.past, self.past + self.positions.shape[1], device=self.positions.device
            ),
        )

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What all layers share, e.g. the rotary table: made at the first call with `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def mask(self, sight: Sight) -> Tensor | None:
        """Boolean [B or 1, 1, T, S], true where a query may look.

        None where plain causal order, or for other sights nothing at all, says the same. One layout serves all
        layers, so that each mask is made once. A padding token sees padding.
        """
        return self.once(("mask", sight), lambda: self._mask(sight))  # compile can't follow a cached_property

    def distances(self) -> Tensor:
        """key − query in tokens, int64 [T, S]."""
        return self.once("distances", self._distances)

    def _mask(self, sight: Sight) -> Tensor | None:
        if sight == "cross":
            memory = None if self.memory is None else self.memory.documents
            return None if memory is None else _same(self._documents(), memory)
        seen = self._seen_documents()
        same_B1TS = None if seen is None else _same(self._documents(), seen)
        if sight == "full" or (same_B1TS is None and self.prefix is None and not self.past):
            return same_B1TS if sight == "full" else None
        order = self.distances()[None, None] <= 0
        if self.prefix is not None and not self.past:
            order = order | self.prefix.bool()[:, None, None, :]
        return order if same_B1TS is None else same_B1TS & order

    def _documents(self) -> Tensor:
        return torch.zeros_like(self.positions) if self.documents is None else self.documents

    def _seen_documents(self) -> Tensor | None:
        if not self.past or (self.documents is None and self.past_documents is None):
            return self.documents
        past = self.past_documents
        if past is None:
            past = self.positions.new_zeros(len(self.positions), self.past)
        return torch.cat([past, self._documents()], dim=1)

    def _distances(self) -> Tensor:
        seen = torch.arange(self.past + self.positions.shape[1], device=self.positions.device)
        return seen[None, :] - self.indices[:, None]


def targets_ahead(targets_BT: Tensor, documents_BT: Tensor | None, n: int) -> Tensor:
    """The targets `n` tokens further on in the same document, −100 where there is none, [B, T]."""
    ahead = torch.full_like(targets_BT, NO_TARGET)
    ahead[:, :-n] = targets_BT[:, n:]
    if documents_BT is not None:
        ahead[:, :-n][documents_BT[:, n:] != documents_BT[:, :-n]] = NO_TARGET
    return ahead


def _same(queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
    return (queries_BT[:, :, None] == keys_BS[:, None, :])[:, None]
