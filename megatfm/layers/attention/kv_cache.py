"""Key-value caches for generation: keys and values of the tokens so far, as long as a pattern's queries see them."""

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.sequence import SequenceMetadata

# B batch, K key-value heads, T new tokens, S all tokens, H head width


class LayerCache:
    """The cache of one layer; room for `capacity` tokens is taken at the first call.

    memory: keys and values of the memory that its cross-attention looks at, once they are made.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._compressed: tuple[Tensor, Tensor, Tensor] | None = None

    def update(
        self, k_BKTH: Tensor, v_BKTH: Tensor, *, keeps: int | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Add new keys and values; returns those of all tokens, [B, K, S, H] each.

        keeps: of how many tokens they are kept for the next call, besides those of the `first`; it returns these and
        the new ones. Raises IndexError past the capacity.
        """
        end = self.length + k_BKTH.shape[2]
        if end > self.capacity:
            raise IndexError(f"key-value cache is full: {end} tokens, room for {self.capacity}")
        if keeps is not None:
            self.length = end
            return self._last(k_BKTH, v_BKTH, keeps, first)
        if self._keys is None or self._values is None:
            self._keys, self._values = (self._room(x) for x in (k_BKTH, v_BKTH))
        self._keys[:, :, self.length : end] = k_BKTH
        self._values[:, :, self.length : end] = v_BKTH
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def append_compressed(
        self, k_BKSH: Tensor, v_BKSH: Tensor, places_BS: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add keys and values that were made of several tokens, and where they stand; returns all so far."""
        if self._compressed is not None:
            k, v, places = self._compressed
            k_BKSH, v_BKSH = torch.cat([k, k_BKSH], 2), torch.cat([v, v_BKSH], 2)
            places_BS = torch.cat([places, places_BS], 1)
        self._compressed = k_BKSH, v_BKSH, places_BS
        return self._compressed

    def select(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, int64 [rows], as beam search does."""
        if self._compressed is not None:
            k, v, places = self._compressed
            self._compressed = k[rows], v[rows], places[rows]
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
        if self.memory is not None:
            self.memory = self.memory[0][rows], self.memory[1][rows]

    def _last(self, k_BKTH: Tensor, v_BKTH: Tensor, keeps: int, first: int) -> tuple[Tensor, Tensor]:
        if self._keys is not None and self._values is not None:
            k_BKTH, v_BKTH = torch.cat([self._keys, k_BKTH], 2), torch.cat([self._values, v_BKTH], 2)
        first = min(first, k_BKTH.shape[2])
        last = max(k_BKTH.shape[2] - keeps, first)
        # Copies, so that what lies between is given back.
        self._keys, self._values = (torch.cat([x[:, :, :first], x[:, :, last:]], 2) for x in (k_BKTH, v_BKTH))
        return k_BKTH, v_BKTH

    def _room(self, x_BKTH: Tensor) -> Tensor:
        batch, heads, _, width = x_BKTH.shape
        return x_BKTH.new_empty(batch, heads, self.capacity, width)


def update_cache(
    cache: LayerCache, k_BKTH: Tensor, v_BKTH: Tensor, pattern: AttentionPattern, sequence: SequenceMetadata, *,
    keep_all: bool = False,
) -> tuple[Tensor, Tensor, SequenceMetadata]:  # fmt: skip
    """Return keys and values that a pattern's new queries see, and the sequence metadata that fits them.

    What no later query sees is evicted, unless `keep_all`. Raises UsageError where a prefix is to be kept: all later
    tokens of its document see it, which a pattern that is not full in this cache forgets.
    """
    if sequence.prefix_mask is not None and pattern.simplify(cache.capacity).builtin_mask is None:
        raise UsageError(
            f"later tokens see all of a prefix, which a key-value cache does not keep under the pattern {pattern!r}: "
            "call the model without a cache, or with model.attention.pattern.name = 'full'"
        )
    first = sequence.initial_tokens_end(pattern.n_initial_kept) if pattern.n_initial_kept else 0
    k_BKSH, v_BKSH = cache.update(
        k_BKTH, v_BKTH, keeps=None if keep_all else pattern.cache_window, first=first
    )
    return k_BKSH, v_BKSH, sequence.after_eviction(k_BKSH.shape[2], first)


class KVCache:
    """One LayerCache for each layer of a model, and the documents [B, length] of the tokens in it, if they differ."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]
        self.documents: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of each row so far, the same in every layer."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, int64 [rows]."""
        for layer in self.layers:
            layer.select(rows)
        if self.documents is not None:
            self.documents = self.documents[rows]
