"""Keys and values of the tokens seen so far, for generation."""

import torch
from torch import Tensor

# B batch, K key-value heads, T new tokens, S all tokens, H head width


class LayerCache:
    """The cache of one layer; room for `capacity` tokens is taken at the first call."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._store: Tensor | None = None

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values; returns those of all tokens, [B, K, S, H] each.

        Raises IndexError past the capacity.
        """
        end = self.length + k_BKTH.shape[2]
        if end > self.capacity:
            raise IndexError(f"key-value cache is full: {end} tokens, room for {self.capacity}")
        if self._store is None:
            batch, heads, _, width = k_BKTH.shape
            self._store = torch.empty(
                2, batch, heads, self.capacity, width, dtype=k_BKTH.dtype, device=k_BKTH.device
            )
        self._store[0, :, :, self.length : end] = k_BKTH
        self._store[1, :, :, self.length : end] = v_BKTH
        self.length = end
        return self._store[0, :, :, :end], self._store[1, :, :, :end]


class KVCache:
    """One LayerCache for each layer of a model."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        return self.layers[0].length
