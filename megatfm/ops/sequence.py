"""Where the tokens of a batch stand: what attention and position encodings need to know about a sequence."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

# B batch, T queries, S keys

Made = TypeVar("Made")


class SequenceLayout:
    """Global positions and document boundaries of a batch.

    positions: int64 [B, T], the position of each token in its document.
    documents: int64 [B, T] or None. Tokens see one another only inside one document; −1 marks padding.
    past: number of tokens in the key-value cache before these; with it, documents must be None.
    """

    def __init__(self, positions_BT: Tensor, documents_BT: Tensor | None = None, past: int = 0) -> None:
        self.positions = positions_BT
        self.documents = documents_BT
        self.past = past
        self._made: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What all layers share, e.g. the rotary table: made at the first call with `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    @property
    def causal_mask(self) -> Tensor | None:
        """Boolean [B, 1, T, S], true where a query may look; None where plain causal order says it all.

        One layout serves all layers, so that the mask is made once. A padding token sees itself.
        """
        return self.once("causal mask", self._causal_mask)  # torch.compile can't follow a cached_property

    def _causal_mask(self) -> Tensor | None:
        length = self.positions.shape[1]
        if self.documents is None and self.past == 0:
            return None
        device = self.positions.device
        mask_TS = torch.ones(length, length + self.past, dtype=torch.bool, device=device).tril(self.past)
        if self.documents is None:
            return mask_TS[None, None]
        same_BTT = self.documents[:, :, None] == self.documents[:, None, :]
        return (same_BTT & mask_TS)[:, None]
