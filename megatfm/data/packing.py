"""Packing: the documents of one block, built by the objective, joined and cut into rows of equal length."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError

IGNORED_TARGET = -100
"""The target of positions that count in no loss (torch's default `ignore_index`)."""
NO_DOCUMENT = -1
"""The document number of padding."""

Fields = dict[str, NDArray[np.int64]]
Key = tuple[int, int, int]


class Objective(Protocol):
    """Makes the model's inputs and targets from a document; a pure function of document and key."""

    def lengths(self, n_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths [n] of the built documents, from the documents' numbers of tokens [n]."""
        ...

    def build(self, tokens: NDArray[np.integer], key: Key) -> dict[str, NDArray[np.integer]]:
        """Integer fields [length] of a document, among them "tokens" and "targets".

        `key` is (seed, epoch, sample number); values must fit 32 bits.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """`fields` [total] of the joined documents, which start at `starts` [n_documents]; cut only when read."""

    fields: dict[str, NDArray[np.int32]]
    starts: NDArray[np.int64]
    pad_id: int

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + sum(field.nbytes for field in self.fields.values())

    def row(self, number: int, length: int, as_one_document: bool = False) -> Fields:
        """Row `number`: its slice of every field, with "documents" (0, 1, … in the row) and "positions"
        (from 0 in each piece of a document); past the end of the block there is padding."""
        total = len(self.fields["tokens"])
        begin, end = (min(n * length, total) for n in (number, number + 1))
        fill = {"tokens": self.pad_id, "targets": IGNORED_TARGET}
        row = {
            name: _padded(field[begin:end], length, fill.get(name, 0)) for name, field in self.fields.items()
        }
        where = np.arange(begin, end)
        if as_one_document:
            row["documents"] = _padded(np.zeros_like(where), length, NO_DOCUMENT)
            row["positions"] = _padded(where - begin, length, 0)
            return row
        documents = np.searchsorted(self.starts, where, side="right") - 1
        positions = where - np.maximum(self.starts[documents], begin)
        row["documents"] = _padded(documents - documents[:1], length, NO_DOCUMENT)
        row["positions"] = _padded(positions, length, 0)
        return row


def pack(documents: list[dict[str, NDArray[np.integer]]], pad_id: int) -> PackedBlock:
    """Join built documents, in the order given; empty ones take no place."""
    lengths = np.array([len(document["tokens"]) for document in documents], np.int64)
    starts = np.cumsum(lengths) - lengths
    fields = {name: _joined([d[name] for d in documents], name) for name in documents[0]}
    return PackedBlock(fields, starts[lengths > 0], pad_id)


def _joined(pieces: list[NDArray[np.integer]], name: str) -> NDArray[np.int32]:
    joined = np.concatenate(pieces)
    narrow = joined.astype(np.int32)
    if not np.array_equal(narrow, joined):
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return narrow


def _padded(values: NDArray[np.integer], length: int, fill: int) -> NDArray[np.int64]:
    padded = np.full(length, fill, np.int64)
    padded[: len(values)] = values
    return padded
