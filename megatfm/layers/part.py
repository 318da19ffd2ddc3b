"""Some of the tokens of rows, as queries, and some or all of these rows' tokens, as keys."""

import copy
from collections.abc import Hashable
from typing import Self

from torch import Tensor

from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.moved import on_host


class Part(SequenceMetadata):
    """Tokens at `places` int64 [T] of whole rows, in ascending order; the keys are those of the rows, unless
    `looking_at` says which.

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
        self.row, self.places = row, places
        self.looked_at: Tensor | None = None

    @property
    def real_of_row(self) -> Tensor:
        return self.row.real

    @property
    def most_documents(self) -> int:
        return self.row.most_documents

    def _on_host(self) -> SequenceMetadata:
        memory = None if self.memory is None else self.memory.on_host()
        host = type(self)(self.row.on_host(), on_host(self.places), memory)
        host.looked_at = None if self.looked_at is None else on_host(self.looked_at)
        return host

    def of_row(self) -> SequenceMetadata:
        """The whole rows, with the random keys of the layer at hand."""
        row = copy.copy(self.row)
        row.rng_keys = self.rng_keys
        return row

    def looking_at(self, key: Hashable, places: Tensor) -> Self:
        """The same with keys at these places of the row alone. key: what all layers that look there share it by."""
        part = copy.copy(self)
        part.looked_at, part._made = places, self.once(("looking at", key), dict)
        return part

    def at(self, key: Hashable, places: Tensor) -> Self:
        """Other queries of the same rows, with the random keys of the layer at hand. key: what all layers know them
        by."""
        part = copy.copy(self.once(("at", key), lambda: type(self)(self.row, places)))
        part.rng_keys = self.rng_keys
        return part

    @property
    def length(self) -> int:
        return self.row.length

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def indices(self) -> Tensor:
        return self.places

    @property
    def key_indices(self) -> Tensor:
        return self.row.indices if self.looked_at is None else self.looked_at

    def distances_once(self) -> Tensor:
        """Of the whole row, [2L − 1]: the tokens here don't stand next to one another."""
        return self.row.distances_once()

    @property
    def opened(self) -> Tensor | None:
        return None if self.row.opened is None else self.row.opened[:, self.key_indices]

    def document_numbers(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        numbers = self.row.document_numbers()
        if of_memory:
            assert self.memory is not None
            keys = self.memory.documents
            if isinstance(self.memory, Part):
                keys = self.memory.row.documents
            return None if keys is None else (self._documents(), keys)
        return None if numbers is None else (numbers[0][:, self.places], numbers[1][:, self.key_indices])

    def _document_lengths(self) -> Tensor:
        return self.row.document_lengths()[:, self.places]

    def _document_places(self) -> tuple[Tensor, Tensor]:
        of_q, of_k = self.row.document_places()
        return of_q[:, self.places], of_k[:, self.key_indices]
