"""Sequence metadata: positions, documents, prefixes and random keys of a batch, and masks derived from them."""

import copy
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from megatfm.ops.attention.fused import uniform_cu_seqlens
from megatfm.ops.keyed_random import fold_in
from megatfm.ops.transfer import is_on_host, to_host

# B batch, T queries, S keys

T = TypeVar("T")

ALL_QUERIES = slice(None)


def selects_all(selection: slice, n: int) -> bool:
    """Return whether a slice selects all of n elements."""
    return len(range(*selection.indices(n))) == n


class Pattern(Protocol):
    """The method of `AttentionPattern` that SequenceMetadata calls."""

    def mask(
        self, sequence: "SequenceMetadata", first_head: int, n_heads: int, queries: slice = ...
    ) -> Tensor | None: ...


class SequenceMetadata:
    """Positions, document boundaries, prefixes and random keys of a batch.

    positions: int64 [B, T], position of each token in its document.
    documents: int64 [B, T], document id of each token, −1 for padding; attention stays within a document. None: each
    row is one document. Tokens of a document are contiguous, so that distances in documents are distances in rows.
    prefix: bool [B, T], tokens that all tokens of their document see; None: none.
    rng_keys: int64 [B], random keys for dropout.
    past: number of tokens in the key-value cache before these; past_documents: int64 [B, past], their documents.
    memory: metadata of the encoder's tokens, for cross-attention.
    cu_seqlens: int32 [C + 1], starts of documents in the concatenated rows
    (`megatfm.ops.attention.fused.compute_cu_seqlens`), for varlen kernels.
    grid: int32 [B, T, 4], row, column, height and width of each patch in its image's grid; special tokens have row −1
    and their index as the column. None: no images.
    masked: bool [B, T], patches that the embedding replaces by its mask token.
    inserted: bool [B, T] and vectors [B, T, E] that replace token embeddings.
    """

    def __init__(
        self,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
        rng_keys: Tensor | None = None,
        past: int = 0,
        past_documents: Tensor | None = None,
        memory: "SequenceMetadata | None" = None,
        cu_seqlens: Tensor | None = None,
        grid: Tensor | None = None,
    ) -> None:
        self.cu_seqlens, self.grid = cu_seqlens, grid
        self.positions, self.documents, self.prefix = positions, documents, prefix
        self._rng_keys, self._depth = rng_keys, -1
        self.cached_length, self.cached_documents, self.memory = past, past_documents, memory
        self.masked: Tensor | None = None
        self.inserted: tuple[Tensor, Tensor] | None = None
        self.skip_rate: Tensor | None = None
        """The layer's stochastic depth rate, a scalar; None: 0."""
        self.n_evicted = 0
        """Number of tokens that the layer's cache has evicted, after the first `n_initial_kept`."""
        self.n_initial_kept = 0
        self.tokens: Tensor | None = None
        """Token ids, int64 [B, T], if the model reads tokens."""
        self._cache: dict[Hashable, object] = {}

    @property
    def rng_keys(self) -> Tensor | None:
        """Random keys of the layer, int64 [B]. Hashed with the depth on first access, so unused keys cost nothing."""
        if self._rng_keys is None or self._depth < 0:
            return self._rng_keys
        keys_B = self._rng_keys
        return self.cached(("rng keys", self._depth), lambda: fold_in(keys_B, self._depth + 1))

    @rng_keys.setter
    def rng_keys(self, keys_B: Tensor | None) -> None:
        """Set the layer's final keys, without hashing the depth."""
        self._rng_keys, self._depth = keys_B, -1

    def at_layer(self, depth: int, skip_rate: float = 0.0, *, n_compiled_layers: int = 0) -> Self:
        """Return a copy for one layer: its own random keys, everything else shared.

        n_compiled_layers: number of layers if blocks run under torch.compile. All layers' keys are then hashed at once,
        because a depth as a Python int would cause one recompilation per layer.
        """
        if self._rng_keys is None and not skip_rate:
            return self
        layer, keys_B = copy.copy(self), self._rng_keys
        if skip_rate:  # even without random keys, so that stochastic depth raises an error in training
            layer.skip_rate = torch.full((), skip_rate, dtype=torch.float64, device=self.positions.device)
        if keys_B is None:
            return layer
        if n_compiled_layers:
            depths = torch.arange(1, n_compiled_layers + 1, device=keys_B.device)[:, None]
            keys_of_layers = self.cached(("rng keys of", n_compiled_layers), lambda: fold_in(keys_B, depths))
            layer.rng_keys = keys_of_layers[depth]
        else:
            layer._depth = depth
        return layer

    def after_eviction(self, n_cached: int, n_first: int = 0) -> Self:
        """Return a copy for a layer whose cache holds `n_cached` keys: of the first `n_first` tokens, and the last."""
        n_evicted = self.cached_length + self.positions.shape[1] - n_cached
        if not n_evicted:
            return self
        layer = copy.copy(self)
        layer.n_evicted, layer.n_initial_kept = n_evicted, n_first
        layer._cache = self.cached(("after eviction", n_evicted, n_first), dict)
        return layer

    def on_host(self) -> "SequenceMetadata":
        """Return a copy in host memory, without tokens and random keys, from which the host plans; itself on a CPU.

        Does not wait for the device if the batch came from the host by `megatfm.ops.transfer.move_to_device`.
        """
        return self if is_on_host(self.positions) else self.cached("on host", self._on_host)

    def _on_host(self) -> "SequenceMetadata":
        host = copy.copy(self)
        host._cache, host._rng_keys, host.skip_rate, host.tokens = {}, None, None, None
        for name in ("positions", "documents", "prefix", "cached_documents", "cu_seqlens", "grid"):
            values = getattr(self, name)
            setattr(host, name, None if values is None else to_host(values))
        host.memory = None if self.memory is None else self.memory.on_host()
        return host

    def find_initial_tokens_end(self, count: int) -> int:
        """Return the smallest n such that the first n tokens of a row contain the first `count` of each document."""
        if self.document_ids() is None:
            return count
        return self.cached(("until first", count), lambda: self._find_initial_end(count))

    def _find_initial_end(self, count: int) -> int:
        documents_BS = self.on_host()._documents_with_cached()
        is_start_BS = documents_BS >= 0
        is_start_BS[:, 1:] &= documents_BS[:, 1:] != documents_BS[:, :-1]
        index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
        return int((index_S * is_start_BS).max()) + count

    def _select_cached(self, values: Tensor) -> Tensor:
        """Select values of the tokens that the cache still has, along the last dim [past + T]."""
        if not self.n_initial_kept:
            return values[..., self.n_evicted :]
        last = self.n_initial_kept + self.n_evicted
        return torch.cat([values[..., : self.n_initial_kept], values[..., last:]], -1)

    @property
    def length(self) -> int:
        """Number of tokens of a row, cached ones included."""
        return self.cached_length + self.positions.shape[1]

    @property
    def is_full_sequence(self) -> bool:
        """Whether these are all tokens of their rows; false for a `SequenceShard`."""
        return self.full_sequence is self

    @property
    def has_plain_rows(self) -> bool:
        """Whether queries and keys are all tokens of their rows, without cached tokens or a prefix."""
        return self.is_full_sequence and not self.cached_length and self.prefix_mask is None

    @property
    def full_sequence(self) -> "SequenceMetadata":
        """Metadata of the full rows: itself, except for a `SequenceShard`."""
        return self

    @property
    def indices(self) -> Tensor:
        """Token indices [T] in their rows."""
        device = self.positions.device
        return self.cached("indices", lambda: torch.arange(self.cached_length, self.length, device=device))

    @property
    def key_indices(self) -> Tensor:
        """Token indices [S] of all keys, cached ones included."""
        device = self.positions.device
        return self.cached("key indices", lambda: self._select_cached(torch.arange(self.length, device=device)))

    @property
    def prefix_mask(self) -> Tensor | None:
        """Prefix tokens, bool [B, T], visible to all of their document; None without a prefix or with cached tokens."""
        return None if self.prefix is None or self.cached_length else self.prefix.bool()

    @property
    def non_padding_mask(self) -> Tensor:
        """Boolean [B, T], false for padding."""
        return torch.ones_like(self.positions).bool() if self.documents is None else self.documents >= 0

    @property
    def documents_or_zeros(self) -> Tensor:
        """Document id of each token [B, T]: `documents`, or 0 where each row is one document."""
        return torch.zeros_like(self.positions) if self.documents is None else self.documents

    @property
    def image_numbers(self) -> Tensor | None:
        """Number of each token's image in its row, int64 [B, T], −1 for padding; None for text, or one image a row."""
        return None if self.grid is None else self.documents

    @property
    def max_documents_per_row(self) -> int:
        """Largest number of documents in a full row; 1 for unpacked rows."""
        documents = self.full_sequence.documents
        if documents is None:
            return 1
        return self.cached("most documents", lambda: max(int(to_host(documents).max()) + 1, 1) if len(documents) else 1)

    def find_document_members(self) -> Tensor:
        """Return boolean [B, N, T], whether a token is in each of N = `max_documents_per_row` documents of its row."""
        documents_N1 = torch.arange(self.max_documents_per_row, device=self.positions.device)[:, None]
        return self.documents_or_zeros[:, None] == documents_N1

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value that layers share, such as the rotary table; calls `make` on the first access of a key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]

    def fork_cache(self) -> Self:
        """Return a copy with a cache of its own, which has what this one has now."""
        fork = copy.copy(self)
        fork._cache = dict(self._cache)
        return fork

    def mask(
        self, pattern: Pattern, first_head: int = 0, n_heads: int = 1, queries: slice = ALL_QUERIES
    ) -> Tensor | None:
        """Return the boolean mask [B or 1, n or 1, T, S], true where visible; None if `builtin_mask` is exact.

        Cached for all layers. Padding sees padding. first_head, n_heads: for patterns that differ by head. queries: a
        slice; masks of some are not cached.
        """
        if not selects_all(queries, self.positions.shape[1]):
            return pattern.mask(self, first_head, n_heads, queries)
        key = ("mask", pattern, first_head, n_heads)
        return self.cached(key, lambda: pattern.mask(self, first_head, n_heads))

    def uniform_cu_seqlens(self) -> Tensor:
        """Return starts of documents in the concatenated rows, and the end, int32 [C + 1]."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        rows, length = self.positions.shape
        return self.cached("row starts", lambda: uniform_cu_seqlens(rows, length, self.positions.device))

    def unique_relative_positions(self) -> Tensor:
        """Return each distance key − query once, int64 [T + S − 1] (`megatfm.ops.attention.mask`)."""
        queries, keys = self.indices, self.key_indices
        first, count = self.n_evicted - self.length + 1, len(queries) + len(keys) - 1
        last = first + count
        return self.cached("distances once", lambda: torch.arange(first, last, device=queries.device))

    def relative_positions(self, queries: slice = ALL_QUERIES) -> Tensor:
        """Return key − query in tokens, int64 [T, S]. queries: a slice, by default all."""
        if not selects_all(queries, len(self.indices)):
            return self.key_indices[None, :] - self.indices[queries, None]
        return self.cached("distances", lambda: self.key_indices[None, :] - self.indices[:, None])

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return the documents of queries [B, T] and of keys [B, S]; None if rows are one document each, or absent."""
        if of_memory:
            keys = None if self.memory is None else self.memory.documents
            return None if keys is None else (self.documents_or_zeros, keys)
        is_packed = self.documents is not None or (self.cached_length and self.cached_documents is not None)
        if not is_packed or not len(self.positions):
            return None
        return self.documents_or_zeros, self._select_cached(self._documents_with_cached())

    def same_document(self, *, of_memory: bool = False, queries: slice = ALL_QUERIES) -> Tensor | None:
        """Return boolean [B, 1, T, S], whether query and key share a document; None if all do. queries: see `mask`."""
        ids = self.document_ids(of_memory=of_memory)
        return None if ids is None else (ids[0][:, queries, None] == ids[1][:, None, :])[:, None]

    def positions_in_document(self) -> tuple[Tensor, Tensor]:
        """Return the index in its document of each query [B, T] and each key [B, S]."""
        return self.cached("document places", self._positions_in_document)

    def document_lengths(self) -> Tensor:
        """Return the length, so far, of each query's document, [B, T]."""
        return self.cached("document lengths", self._document_lengths)

    def document_spans(self) -> list[tuple[int | None, int, int]]:
        """Return row, start and end of each document; row None: for all rows, each of which is one document."""
        if self.document_ids() is None:
            return [(None, 0, self.length)]
        return self.cached("runs", self._find_spans)

    def _find_spans(self) -> list[tuple[int | None, int, int]]:
        spans: list[tuple[int | None, int, int]] = []
        for row, positions_T in enumerate(self.on_host().positions_in_document()[0]):
            starts = [*(positions_T == 0).nonzero()[:, 0].tolist(), len(positions_T)]
            spans += [(row, begin, end) for begin, end in pairwise(starts)]
        return spans

    def _document_lengths(self) -> Tensor:
        positions_BS = self.positions_in_document()[1]
        if self.document_ids() is None:
            return positions_BS[:, -1:] + 1
        # For each token, the index of the next document end: a reversed cumulative minimum.
        is_end_BS = torch.ones_like(positions_BS, dtype=torch.bool)
        is_end_BS[:, :-1] = positions_BS[:, 1:] == 0
        index_S = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        end_BS = index_S.where(is_end_BS, positions_BS.shape[1]).flip(1).cummin(1).values.flip(1)
        return (positions_BS.gather(1, end_BS) + 1)[:, positions_BS.shape[1] - self.positions.shape[1] :]

    def _positions_in_document(self) -> tuple[Tensor, Tensor]:
        if self.document_ids() is None:
            return self.indices[None], self.key_indices[None]
        keys_BS = self._documents_with_cached()
        index_S = torch.arange(keys_BS.shape[1], device=keys_BS.device)
        is_start_BS = torch.ones_like(keys_BS, dtype=torch.bool)
        is_start_BS[:, 1:] = keys_BS[:, 1:] != keys_BS[:, :-1]
        positions_BS = index_S - (index_S * is_start_BS).cummax(1).values
        return positions_BS[:, self.cached_length :], self._select_cached(positions_BS)

    def _documents_with_cached(self) -> Tensor:
        """Return the documents of cached and new tokens, [B, past + T]."""
        if not self.cached_length:
            return self.documents_or_zeros
        past = self.cached_documents
        if past is None:
            past = self.positions.new_zeros(len(self.positions), self.cached_length)
        return torch.cat([past, self.documents_or_zeros], dim=1)
