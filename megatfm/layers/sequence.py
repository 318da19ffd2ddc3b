"""Sequence metadata for attention and position encodings: positions, documents, prefixes and random keys."""

import copy
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from megatfm.ops.attention.varlen import uniform_cu_seqlens
from megatfm.ops.keyed_random import fold_in
from megatfm.ops.transfer import is_on_host, to_host

# B batch, T queries, S keys

T = TypeVar("T")

ALL_QUERIES = slice(None)


class Pattern(Protocol):
    """The one method of `AttentionPattern` that is called here."""

    def mask(
        self, sequence: "SequenceMetadata", first_head: int, n_heads: int, rows: slice = ...
    ) -> Tensor | None: ...


class SequenceMetadata:
    """Positions, document boundaries, prefixes and random keys of a batch.

    positions: int64 [B, T], the position of each token in its document. documents: int64 [B, T] or None; tokens see
    one another only inside one document, and −1 marks padding. prefix: bool [B, T] or None, tokens that all of their
    document sees. rng_keys: int64 [B], on which dropout depends. past: number of tokens in the key-value cache before
    these; past_documents [B, past]: theirs. memory: the sequence of what cross-attention looks at. starts: int32,
    where documents begin in rows laid end to end (`megatfm.ops.attention.cu_seqlens_from_documents`), for kernels
    that ask for it. grid: int32 [B, T, 4] or None, row, column, height and width of a patch in its image's grid of
    patches; of special tokens the row is −1 and the column their number. masked: bool [B, T] or None, patches for which
    the embedding puts its mask token. inserted: bool [B, T] and vectors [B, T, E] or None, which stand in place of
    embedded tokens.

    Tokens of one document stand next to one another, so that distances in a document are distances in the row.
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
        starts: Tensor | None = None,
        grid: Tensor | None = None,
    ) -> None:
        self.cu_seqlens, self.grid = starts, grid
        self.positions, self.documents, self.prefix = positions, documents, prefix
        self._rng_keys, self._depth = rng_keys, -1
        self.cached_length, self.cached_documents, self.memory = past, past_documents, memory
        self.masked: Tensor | None = None
        self.inserted: tuple[Tensor, Tensor] | None = None
        self.skip_rate: Tensor | None = None
        """The layer's drop path rate, a scalar: how often stochastic depth leaves a sublayer out; None: never."""
        self.n_evicted = 0
        """Cached tokens that the layer's cache has evicted; they come after the first `n_initial_kept`."""
        self.n_initial_kept = 0
        self.tokens: Tensor | None = None
        """int64 [B, T], the tokens themselves, if the model reads tokens."""
        self._cache: dict[Hashable, object] = {}

    @property
    def rng_keys(self) -> Tensor | None:
        """int64 [B], hashed with the layer's depth on first access: they cost nothing where nothing is dropped."""
        if self._rng_keys is None or self._depth < 0:
            return self._rng_keys
        keys_B = self._rng_keys
        return self.cached(("rng keys", self._depth), lambda: fold_in(keys_B, self._depth + 1))

    @rng_keys.setter
    def rng_keys(self, keys_B: Tensor | None) -> None:
        """Keys of the layer at hand, mixed with nothing more."""
        self._rng_keys, self._depth = keys_B, -1

    def at_layer(self, depth: int, skip_rate: float = 0.0, *, n_compiled_layers: int = 0) -> Self:
        """Return a copy for one layer: its own random keys, everything else shared.

        n_compiled_layers: number of layers if blocks run under torch.compile. All layers' keys are then hashed at once,
        because a depth as a Python int would cause one recompilation per layer.
        """
        if self._rng_keys is None and not skip_rate:
            return self
        layer, keys_B = copy.copy(self), self._rng_keys
        if skip_rate:  # without keys too, so that stochastic depth in training refuses to run
            layer.skip_rate = torch.full((), skip_rate, dtype=torch.float64, device=self.positions.device)
        if keys_B is None:
            return layer
        if n_compiled_layers:
            depths = torch.arange(1, n_compiled_layers + 1, device=keys_B.device)[:, None]
            layer.rng_keys = self.cached(("rng keys of", n_compiled_layers), lambda: fold_in(keys_B, depths))[
                depth
            ]
        else:
            layer._depth = depth
        return layer

    def after_eviction(self, count: int, first: int = 0) -> Self:
        """Return a copy for a layer whose cache gave `count` keys: those of the `first` tokens, and of the last."""
        forgotten = self.cached_length + self.positions.shape[1] - count
        if not forgotten:
            return self
        layer = copy.copy(self)
        layer.n_evicted, layer.n_initial_kept = forgotten, first
        layer._cache = self.cached(("forgotten", forgotten, first), dict)
        return layer

    def on_host(self) -> "SequenceMetadata":
        """Return a copy in host memory, without tokens and random keys, for plans by its values: itself on a CPU, and
        on a device without waiting where the batch was moved there (`megatfm.ops.transfer`)."""
        return self if is_on_host(self.positions) else self.cached("on host", self._on_host)

    def _on_host(self) -> "SequenceMetadata":
        host = copy.copy(self)
        host._cache, host._rng_keys, host.skip_rate, host.tokens = {}, None, None, None
        for name in ("positions", "documents", "prefix", "cached_documents", "cu_seqlens", "grid"):
            values = getattr(self, name)
            setattr(host, name, None if values is None else to_host(values))
        host.memory = None if self.memory is None else self.memory.on_host()
        return host

    def initial_tokens_end(self, count: int) -> int:
        """The least n such that the first n tokens of each row hold the first `count` of each of its documents."""
        if self.document_ids() is None:
            return count
        return self.cached(("until first", count), lambda: self._until_first(count))

    def _until_first(self, count: int) -> int:
        documents_BS = self.on_host()._all_documents()
        begins_BS = documents_BS >= 0
        begins_BS[:, 1:] &= documents_BS[:, 1:] != documents_BS[:, :-1]
        places_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
        return int((places_S * begins_BS).max()) + count

    def _kept(self, values: Tensor) -> Tensor:
        """Select the tokens whose keys are in the cache, from the last dim past + T."""
        if not self.n_initial_kept:
            return values[..., self.n_evicted :]
        return torch.cat(
            [values[..., : self.n_initial_kept], values[..., self.n_initial_kept + self.n_evicted :]], -1
        )

    @property
    def length(self) -> int:
        """Tokens of a row, cached ones too."""
        return self.cached_length + self.positions.shape[1]

    @property
    def is_full_sequence(self) -> bool:
        """Whether the tokens are all of their rows (see `SequenceShard`)."""
        return True

    @property
    def indices(self) -> Tensor:
        """Token indices [T] in their rows."""
        return self.cached(
            "indices", lambda: torch.arange(self.cached_length, self.length, device=self.positions.device)
        )

    @property
    def key_indices(self) -> Tensor:
        """Token indices [S] of all keys, cached ones too."""
        return self.cached(
            "key indices", lambda: self._kept(torch.arange(self.length, device=self.positions.device))
        )

    @property
    def prefix_mask(self) -> Tensor | None:
        """Prefix tokens, visible to all of their document, bool [B, T]; None: none, and after the first cached pass."""
        return None if self.prefix is None or self.cached_length else self.prefix.bool()

    @property
    def non_padding_mask(self) -> Tensor:
        """Boolean [B, T], tokens that are no padding."""
        return torch.ones_like(self.positions).bool() if self.documents is None else self.documents >= 0

    @property
    def full_non_padding_mask(self) -> Tensor:
        """Non-padding tokens of the full sequence, [B, S]."""
        return self.non_padding_mask

    @property
    def max_documents_per_row(self) -> int:
        """The most documents in one full row; 1 where rows are not packed."""
        documents = self.documents
        if documents is None:
            return 1
        return self.cached("most documents", lambda: max(int(to_host(documents).max()) + 1, 1))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what all layers share, e.g. the rotary table; `make` is called the first time for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]

    def mask(
        self, pattern: Pattern, first_head: int = 0, n_heads: int = 1, rows: slice | None = None
    ) -> Tensor | None:
        """Boolean [B or 1, n or 1, T, S], true where a query may look; None where `builtin_mask` says the same.

        One object serves all layers, so that each mask is made once. A padding token sees padding. The heads are those
        of patterns that differ by head. rows: of some of the queries alone, and made anew.
        """
        if rows is not None and len(range(*rows.indices(self.positions.shape[1]))) < self.positions.shape[1]:
            return pattern.mask(self, first_head, n_heads, rows)
        key = ("mask", pattern, first_head, n_heads)
        return self.cached(key, lambda: pattern.mask(self, first_head, n_heads))

    def uniform_cu_seqlens(self) -> Tensor:
        """Begins of documents in rows laid end to end, and the end, int32 [C + 1]."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        rows, length = self.positions.shape
        return self.cached("row starts", lambda: uniform_cu_seqlens(rows, length, self.positions.device))

    def unique_relative_positions(self) -> Tensor:
        """key − query in tokens: each distance once, int64 [T + S − 1] (`megatfm.ops.attention.relative_bias`)."""
        queries, keys = self.indices, self.key_indices
        first, count = self.n_evicted - self.length + 1, len(queries) + len(keys) - 1
        return self.cached(
            "distances once", lambda: torch.arange(first, first + count, device=queries.device)
        )

    def relative_positions(self, rows: slice = ALL_QUERIES) -> Tensor:
        """key − query in tokens, int64 [T, S], or of some of the queries."""
        if len(range(*rows.indices(len(self.indices)))) < len(self.indices):
            return self.key_indices[None, :] - self.indices[rows, None]
        return self.cached("distances", lambda: self.key_indices[None, :] - self.indices[:, None])

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        """The documents of queries [B, T] and of keys [B, S]; None where all see all."""
        if of_memory:
            keys = None if self.memory is None else self.memory.documents
            return None if keys is None else (self._documents(), keys)
        if self.documents is None and (not self.cached_length or self.cached_documents is None):
            return None
        return self._documents(), self._kept(self._all_documents())

    def same_document(self, *, of_memory: bool = False, rows: slice = ALL_QUERIES) -> Tensor | None:
        """Boolean [B, 1, T, S], true where query and key are in one document; None where all are. rows: see `mask`."""
        numbers = self.document_ids(of_memory=of_memory)
        return None if numbers is None else (numbers[0][:, rows, None] == numbers[1][:, None, :])[:, None]

    def positions_in_document(self) -> tuple[Tensor, Tensor]:
        """Number of tokens of the same document before each query [B, T] and each key [B, S]."""
        return self.cached("document places", self._document_places)

    def document_lengths(self) -> Tensor:
        """Number of tokens that each query's document has so far, [B, T]."""
        return self.cached("document lengths", self._document_lengths)

    def document_spans(self) -> list[tuple[int | None, int, int]]:
        """Row, begin and end of each document; the row is None where every row is one document."""
        if self.document_ids() is None:
            return [(None, 0, self.length)]
        return self.cached("runs", self._runs)

    def _runs(self) -> list[tuple[int | None, int, int]]:
        spans: list[tuple[int | None, int, int]] = []
        for row, places_T in enumerate(self.on_host().positions_in_document()[0]):
            starts = [*(places_T == 0).nonzero()[:, 0].tolist(), len(places_T)]
            spans += [(row, begin, end) for begin, end in pairwise(starts)]
        return spans

    def _document_lengths(self) -> Tensor:
        places_BS = self.positions_in_document()[1]
        if self.document_ids() is None:
            return places_BS[:, -1:] + 1
        # The last place of a run of tokens is the greatest from there on until a run begins anew.
        ends_BS = torch.ones_like(places_BS, dtype=torch.bool)
        ends_BS[:, :-1] = places_BS[:, 1:] == 0
        index_S = torch.arange(places_BS.shape[1], device=places_BS.device)
        end_BS = index_S.where(ends_BS, places_BS.shape[1]).flip(1).cummin(1).values.flip(1)
        return (places_BS.gather(1, end_BS) + 1)[:, places_BS.shape[1] - self.positions.shape[1] :]

    def _document_places(self) -> tuple[Tensor, Tensor]:
        if self.document_ids() is None:
            return self.indices[None], self.key_indices[None]
        keys_BS = self._all_documents()
        places_S = torch.arange(keys_BS.shape[1], device=keys_BS.device)
        begins_BS = torch.ones_like(keys_BS, dtype=torch.bool)
        begins_BS[:, 1:] = keys_BS[:, 1:] != keys_BS[:, :-1]
        places_BS = places_S - (places_S * begins_BS).cummax(1).values
        return places_BS[:, self.cached_length :], self._kept(places_BS)

    def _documents(self) -> Tensor:
        return torch.zeros_like(self.positions) if self.documents is None else self.documents

    def _all_documents(self) -> Tensor:
        """[B, past + T]."""
        if not self.cached_length:
            return self._documents()
        past = self.cached_documents
        if past is None:
            past = self.positions.new_zeros(len(self.positions), self.cached_length)
        return torch.cat([past, self._documents()], dim=1)


class SequenceShard(SequenceMetadata):
    """A shard of a sequence: queries at `places` int64 [T], ascending, keys from the full sequence or `with_keys_at`.

    All methods give the same values as on the full sequence, so masks, biases and dropout do not depend on sharding.
    """

    def __init__(self, row: SequenceMetadata, places: Tensor, memory: SequenceMetadata | None = None) -> None:
        super().__init__(
            row.positions[:, places],
            None if row.documents is None else row.documents[:, places],
            rng_keys=row.rng_keys,
            memory=memory,
            grid=None if row.grid is None else row.grid[:, places],
        )
        self.full_sequence, self.token_indices = row, places
        self.key_token_indices: Tensor | None = None

    @property
    def full_non_padding_mask(self) -> Tensor:
        return self.full_sequence.non_padding_mask

    @property
    def max_documents_per_row(self) -> int:
        return self.full_sequence.max_documents_per_row

    def _on_host(self) -> SequenceMetadata:
        memory = None if self.memory is None else self.memory.on_host()
        host = type(self)(self.full_sequence.on_host(), to_host(self.token_indices), memory)
        host.key_token_indices = None if self.key_token_indices is None else to_host(self.key_token_indices)
        return host

    def full_row(self) -> SequenceMetadata:
        """The full sequence, with the random keys of the layer at hand."""
        row = copy.copy(self.full_sequence)
        row.rng_keys = self.rng_keys
        return row

    def with_keys_at(self, key: Hashable, places: Tensor) -> Self:
        """Return a copy with keys at these token indices alone. key: by which layers that look there share it."""
        part = copy.copy(self)
        part.key_token_indices, part._cache = places, self.cached(("looking at", key), dict)
        return part

    def with_queries_at(self, key: Hashable, places: Tensor) -> Self:
        """Other queries of the same rows, with the layer's random keys. key: by which all layers share them."""
        part = copy.copy(self.cached(("at", key), lambda: type(self)(self.full_sequence, places)))
        part.rng_keys = self.rng_keys
        return part

    @property
    def length(self) -> int:
        return self.full_sequence.length

    @property
    def is_full_sequence(self) -> bool:
        return False

    @property
    def indices(self) -> Tensor:
        return self.token_indices

    @property
    def key_indices(self) -> Tensor:
        return self.full_sequence.indices if self.key_token_indices is None else self.key_token_indices

    def unique_relative_positions(self) -> Tensor:
        """[2L − 1], those of the full sequence: the tokens here don't stand next to one another."""
        return self.full_sequence.unique_relative_positions()

    @property
    def prefix_mask(self) -> Tensor | None:
        prefix_BS = self.full_sequence.prefix_mask
        return None if prefix_BS is None else prefix_BS[:, self.key_indices]

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        numbers = self.full_sequence.document_ids()
        if of_memory:
            assert self.memory is not None
            keys = self.memory.documents
            if isinstance(self.memory, SequenceShard):
                keys = self.memory.full_sequence.documents
            return None if keys is None else (self._documents(), keys)
        if numbers is None:
            return None
        return numbers[0][:, self.token_indices], numbers[1][:, self.key_indices]

    def _document_lengths(self) -> Tensor:
        return self.full_sequence.document_lengths()[:, self.token_indices]

    def _document_places(self) -> tuple[Tensor, Tensor]:
        places_q, places_k = self.full_sequence.positions_in_document()
        return places_q[:, self.token_indices], places_k[:, self.key_indices]
