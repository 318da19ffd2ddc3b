"""Key-value caches for generation, with eviction of tokens that later queries of a pattern never see."""

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.sequence import SequenceMetadata

# B batch, K key-value heads, T new tokens, S all tokens, H head width


class LayerCache:
    """The cache of one layer. The first `update` allocates memory for `capacity` tokens.

    memory: keys and values of the encoder's output, for cross-attention; None before the first forward pass.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._compressed: tuple[Tensor, Tensor, Tensor] | None = None

    def update(
        self, k_BKTH: Tensor, v_BKTH: Tensor, *, n_last: int | None = None, n_first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return those that the new tokens attend to, [B, K, S, H] each.

        n_last: number of last tokens that the next call sees, besides the first `n_first`; None: all tokens.
        Raises IndexError beyond the capacity.
        """
        end = self.length + k_BKTH.shape[2]
        if end > self.capacity:
            raise IndexError(f"key-value cache is full: {end} tokens, room for {self.capacity}")
        if n_last is not None:
            self.length = end
            return self._evict(k_BKTH, v_BKTH, n_last, n_first)
        if self._keys is None or self._values is None:
            self._keys, self._values = (self._allocate(x) for x in (k_BKTH, v_BKTH))
        self._keys[:, :, self.length : end] = k_BKTH
        self._values[:, :, self.length : end] = v_BKTH
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def append_compressed(self, k_BKSH: Tensor, v_BKSH: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append keys and values that stand for several tokens each, and their positions; return all so far."""
        if self._compressed is not None:
            k, v, positions = self._compressed
            k_BKSH, v_BKSH = torch.cat([k, k_BKSH], 2), torch.cat([v, v_BKSH], 2)
            positions_BS = torch.cat([positions, positions_BS], 1)
        self._compressed = k_BKSH, v_BKSH, positions_BS
        return self._compressed

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64 [rows]; a row may repeat, as in beam search."""
        if self._compressed is not None:
            k, v, positions = self._compressed
            self._compressed = k[rows], v[rows], positions[rows]
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
        if self.memory is not None:
            self.memory = self.memory[0][rows], self.memory[1][rows]

    def _evict(self, k_BKTH: Tensor, v_BKTH: Tensor, n_last: int, n_first: int) -> tuple[Tensor, Tensor]:
        if self._keys is not None and self._values is not None:
            k_BKTH, v_BKTH = torch.cat([self._keys, k_BKTH], 2), torch.cat([self._values, v_BKTH], 2)
        n_first = min(n_first, k_BKTH.shape[2])
        last_start = max(k_BKTH.shape[2] - n_last, n_first)
        # Copies, not views: a view would keep the evicted tokens in memory.
        self._keys, self._values = (torch.cat([x[:, :, :n_first], x[:, :, last_start:]], 2) for x in (k_BKTH, v_BKTH))
        return k_BKTH, v_BKTH

    def _allocate(self, x_BKTH: Tensor) -> Tensor:
        batch, heads, _, width = x_BKTH.shape
        return x_BKTH.new_empty(batch, heads, self.capacity, width)


def update_cache(
    cache: LayerCache, k_BKTH: Tensor, v_BKTH: Tensor, pattern: AttentionPattern, sequence: SequenceMetadata, *,
    keep_all: bool = False,
) -> tuple[Tensor, Tensor, SequenceMetadata]:  # fmt: skip
    """Append to a cache; return the keys and values for the new queries, and the metadata of the cached tokens.

    Evicts tokens that no later query of the pattern sees, unless `keep_all`. Raises UsageError for a prefix together
    with a pattern that evicts: all later tokens of the document see the prefix.
    """
    if sequence.prefix_mask is not None and pattern.simplify(cache.capacity).builtin_mask is None:
        raise UsageError(
            f"later tokens see all of a prefix, which a key-value cache does not keep under the pattern {pattern!r}: "
            "call the model without a cache, or with model.attention.pattern.name = 'full'"
        )
    n_first = sequence.find_initial_tokens_end(pattern.n_initial_kept) if pattern.n_initial_kept else 0
    k_BKSH, v_BKSH = cache.update(k_BKTH, v_BKTH, n_last=None if keep_all else pattern.cache_window, n_first=n_first)
    return k_BKSH, v_BKSH, sequence.after_eviction(k_BKSH.shape[2], n_first)


class KVCache:
    """One LayerCache for each layer of a model.

    documents: int64 [B, length], the document of each cached token; None: each row is one document.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]
        self.documents: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of a row so far, the same in every layer."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64 [rows]."""
        for layer in self.layers:
            layer.select(rows)
        if self.documents is not None:
            self.documents = self.documents[rows]
