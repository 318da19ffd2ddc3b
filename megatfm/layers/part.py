"""Some of the tokens of rows, as queries, and some or all of these rows' tokens, as keys."""

import copy
from collections.abc import Hashable
from typing import Self

from torch import Tensor

from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.moved import to_host


class SequenceShard(SequenceMetadata):
    """Tokens at `places` int64 [T] of whole rows, in ascending order; the keys are those of the rows, unless
    `with_keys_at` says which.

    What attention asks of a sequence it answers as the row does, so that patterns, biases and dropout are the same of a
    part as of the whole.
    """

    def __init__(self, row: SequenceMetadata, places: Tensor, memory: SequenceMetadata | None = None) -> None:
        super().__init__(
            row.positions[:, places],
            None if row.documents is None else row.documents[:, places],
            rng_keys=row.rng_keys,
            memory=memory,
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
        """The whole rows, with the random keys of the layer at hand."""
        row = copy.copy(self.full_sequence)
        row.rng_keys = self.rng_keys
        return row

    def with_keys_at(self, key: Hashable, places: Tensor) -> Self:
        """The same with keys at these places of the row alone. key: what all layers that look there share it by."""
        part = copy.copy(self)
        part.key_token_indices, part._made = places, self.cached(("looking at", key), dict)
        return part

    def with_queries_at(self, key: Hashable, places: Tensor) -> Self:
        """Other queries of the same rows, with the random keys of the layer at hand. key: what all layers know them
        by."""
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
        """Of the whole row, [2L − 1]: the tokens here don't stand next to one another."""
        return self.full_sequence.unique_relative_positions()

    @property
    def prefix_mask(self) -> Tensor | None:
        return (
            None
            if self.full_sequence.prefix_mask is None
            else self.full_sequence.prefix_mask[:, self.key_indices]
        )

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        numbers = self.full_sequence.document_ids()
        if of_memory:
            assert self.memory is not None
            keys = self.memory.documents
            if isinstance(self.memory, SequenceShard):
                keys = self.memory.full_sequence.documents
            return None if keys is None else (self._documents(), keys)
        return (
            None if numbers is None else (numbers[0][:, self.token_indices], numbers[1][:, self.key_indices])
        )

    def _document_lengths(self) -> Tensor:
        return self.full_sequence.document_lengths()[:, self.token_indices]

    def _document_places(self) -> tuple[Tensor, Tensor]:
        of_q, of_k = self.full_sequence.positions_in_document()
        return of_q[:, self.token_indices], of_k[:, self.key_indices]
