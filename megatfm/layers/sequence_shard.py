"""Sequence metadata of the tokens that one context-parallel rank holds."""

import copy
from collections.abc import Hashable
from typing import Self

from torch import Tensor

from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.transfer import to_host


class SequenceShard(SequenceMetadata):
    """The tokens of a sequence that a context-parallel rank holds.

    full_sequence: metadata of the full rows. token_indices: int64 [T], ascending, this rank's tokens, which are the
    queries. Keys are all tokens of the full rows, or those of `with_keys_at`. All methods return the values of the full
    sequence for these tokens, so masks, biases and dropout do not depend on sharding.
    """

    def __init__(
        self, full_sequence: SequenceMetadata, token_indices: Tensor, memory: SequenceMetadata | None = None
    ) -> None:
        super().__init__(
            full_sequence.positions[:, token_indices],
            None if full_sequence.documents is None else full_sequence.documents[:, token_indices],
            rng_keys=full_sequence.rng_keys,
            memory=memory,
            grid=None if full_sequence.grid is None else full_sequence.grid[:, token_indices],
        )
        self._full_sequence, self.token_indices = full_sequence, token_indices
        self.key_token_indices: Tensor | None = None

    @property
    def full_sequence(self) -> SequenceMetadata:
        return self._full_sequence

    def _on_host(self) -> SequenceMetadata:
        memory = None if self.memory is None else self.memory.on_host()
        host = type(self)(self.full_sequence.on_host(), to_host(self.token_indices), memory)
        host.key_token_indices = None if self.key_token_indices is None else to_host(self.key_token_indices)
        return host

    def make_full_row(self) -> SequenceMetadata:
        """Return the full sequence with this layer's random keys."""
        row = copy.copy(self.full_sequence)
        row.rng_keys = self.rng_keys
        return row

    def with_keys_at(self, key: Hashable, token_indices: Tensor) -> Self:
        """Return a copy whose keys are these tokens only. key: cache key, equal for layers with the same keys."""
        shard = copy.copy(self)
        shard.key_token_indices, shard._cache = token_indices, self.cached(("keys at", key), dict)
        return shard

    def with_queries_at(self, key: Hashable, token_indices: Tensor) -> Self:
        """Return a shard whose queries are these tokens of the rows. key: cache key, equal for layers that share it."""
        shard = copy.copy(self.cached(("queries at", key), lambda: type(self)(self.full_sequence, token_indices)))
        shard.rng_keys = self.rng_keys
        return shard

    @property
    def length(self) -> int:
        return self.full_sequence.length

    @property
    def indices(self) -> Tensor:
        return self.token_indices

    @property
    def key_indices(self) -> Tensor:
        return self.full_sequence.indices if self.key_token_indices is None else self.key_token_indices

    def unique_relative_positions(self) -> Tensor:
        """Return the distances of the full rows, [2L − 1], because a shard's tokens are not contiguous."""
        return self.full_sequence.unique_relative_positions()

    @property
    def prefix_mask(self) -> Tensor | None:
        prefix_BS = self.full_sequence.prefix_mask
        return None if prefix_BS is None else prefix_BS[:, self.key_indices]

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        if of_memory:
            assert self.memory is not None
            keys = self.memory.full_sequence.documents
            return None if keys is None else (self.documents_or_zeros, keys)
        ids = self.full_sequence.document_ids()
        if ids is None:
            return None
        return ids[0][:, self.token_indices], ids[1][:, self.key_indices]

    def _document_lengths(self) -> Tensor:
        return self.full_sequence.document_lengths()[:, self.token_indices]

    def _positions_in_document(self) -> tuple[Tensor, Tensor]:
        q_positions, k_positions = self.full_sequence.positions_in_document()
        return q_positions[:, self.token_indices], k_positions[:, self.key_indices]
