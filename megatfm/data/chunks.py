"""Chunks of documents, and the sequences that an objective makes of them.

`split_documents` computes the lengths of all sequences before any text is read. `build_sequences` builds them, and
checks each against the planned length and the declared fields.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.images import ImageIndex
from megatfm.data.sequences import (
    NO_OTHER_DOCUMENTS,
    DocumentChunk,
    Field,
    Fields,
    PackingConfig,
    PackingObjective,
    find_side,
)
from megatfm.errors import MegatfmError, SampleError
from megatfm.rng import ChunkKey, chunk_keys

BatchBuild = Callable[[Sequence[NDArray[Any]]], Mapping[str, NDArray[np.integer]]]
"""Builds the concatenated fields [total] of many documents, equal to `PackingObjective.build_example` of each."""
ImageLengths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Computes sequence lengths [D] from the heights and widths of images [D, 2]."""
CountedLengths = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""Computes sequence lengths [D, sides] from the numbers of tokens and of images [D]."""


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Consecutive chunks of consecutive documents, in stored order. All arrays are [P]."""

    documents: NDArray[np.int64]
    """Document index of each chunk, relative to the first document of the table."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """Index of each chunk in its document (0, 1, …)."""
    lengths: NDArray[np.int64]
    """Lengths of the sequences that will be built, [P, sides]."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """All arrays, in their order."""
        return self.documents, self.starts, self.ends, self.numbers, self.lengths

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(column.nbytes for column in self.columns)

    def iter_chunks(self) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Yield document, start, end, chunk index and lengths of each chunk as Python integers."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    def without_empty(self) -> "ChunkTable":
        """Return the chunks that make a sequence, those with a length above 0 on some side."""
        return self.take(np.flatnonzero(self.lengths.any(axis=1)))

    def take(self, chosen: NDArray[np.integer] | slice) -> "ChunkTable":
        """Return the chunks at the given indices, in that order."""
        return ChunkTable(*(column[chosen] for column in self.columns))


def split_documents(
    n_tokens: NDArray[np.int64], objective: PackingObjective, first: int, seed: int, images: ImageIndex | None = None
) -> ChunkTable:
    """Cut documents of `n_tokens` [D] into consecutive chunks of `objective.max_tokens`; the last may be shorter.

    An empty document is one empty chunk. Chunks that make no sequence are included, with lengths of 0.
    first: index in the corpus of the first document. images: sizes and numbers of images, for an objective whose
    sequence lengths depend on them.
    """
    max_tokens = objective.max_tokens
    if max_tokens is None:
        documents = np.arange(len(n_tokens))
        numbers, starts, ends = np.zeros_like(documents), np.zeros_like(documents), n_tokens
    else:
        counts = np.maximum(-(-n_tokens // max_tokens), 1)
        documents = np.repeat(np.arange(len(n_tokens)), counts)
        numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = numbers * max_tokens
        ends = np.minimum(starts + max_tokens, n_tokens[documents])
    image_lengths: ImageLengths | None = getattr(objective, "image_lengths", None)
    counted_lengths: CountedLengths | None = getattr(objective, "add_image_lengths", None)
    if images is not None and image_lengths is not None:
        lengths = image_lengths(images.image_sizes)[documents]
    elif images is not None and counted_lengths is not None:
        lengths = counted_lengths(ends - starts, images.image_counts[documents])
    else:
        keys = chunk_keys(seed, first + documents, numbers)
        lengths = np.asarray(objective.sequence_lengths(ends - starts, keys), np.int64)
    return ChunkTable(documents, starts, ends, numbers, lengths.reshape(len(documents), -1))


class DocumentSource(ImageIndex, Protocol):
    """Consecutive documents in stored order; `first` is the index of the first one in the corpus."""

    @property
    def first(self) -> int: ...
    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token count of each document [D]."""
        ...

    @property
    def is_quarantined(self) -> NDArray[np.bool_] | None:
        """Mask [D] of documents that become padding."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    def members(self, number: int) -> Mapping[str, bytes]:
        """Return the files stored with a document, by extension."""
        ...

    def describe(self, number: int) -> tuple[str, str]:
        """Describe where a document is stored, and how to train without it, for error messages."""
        ...


@dataclass(frozen=True, eq=False)
class PartnerDocuments:
    """The documents at indices `candidates` [K], without the document `excluded`."""

    documents: DocumentSource
    candidates: NDArray[np.int64]
    excluded: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.documents.lengths[self._numbers]

    def tokens(self, number: int) -> NDArray[np.integer]:
        return self.documents[int(self._numbers[number])]

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        return self.candidates[self.candidates != self.excluded]


def build_sequences(packing: PackingConfig, chunks: ChunkTable, documents: DocumentSource, epoch: int) -> list[Fields]:
    """Build the sequence of each chunk of documents.

    Documents in quarantine become padding of the same length; they have no partners. Raises a MegatfmError that names
    the sample whose sequence differs from plan or declaration.
    """
    sequences, objective, first = [], packing.objective, documents.first
    is_quarantined, partners = documents.is_quarantined, _find_partners(documents, objective)
    for document, start, end, number, planned_lengths in chunks.iter_chunks():
        is_padding = is_quarantined is not None and bool(is_quarantined[document])
        if is_padding and objective.fields is not None:
            sequences.append(_make_padding(objective, planned_lengths))
            continue
        key = ChunkKey(packing.seed, epoch, first + document, number)
        other_documents = NO_OTHER_DOCUMENTS if partners is None else PartnerDocuments(documents, partners, document)
        tokens = documents[document]
        chunk = DocumentChunk(tokens[start:end], other_documents, documents.members(document), end == len(tokens))
        try:
            fields = dict(objective.build_example(chunk, key))
        except SampleError as error:
            location, remedy = documents.describe(document)
            raise MegatfmError(f"{location} {error}{remedy}") from error
        if objective.fields is not None:
            fields = _as_declared(fields, objective.fields, first + document)
        _check_lengths(packing, fields, planned_lengths, first + document)
        if is_padding:
            fields = {name: packing.field(name).filled(len(field)) for name, field in fields.items()}
        sequences.append(fields)
    return sequences


def _find_partners(documents: DocumentSource, objective: PackingObjective) -> NDArray[np.int64] | None:
    """Return the indices [K] of the documents with tokens; None for an objective that reads one document at a time."""
    if not objective.needs_other_documents:
        return None
    quarantined = documents.is_quarantined
    return np.flatnonzero((documents.lengths > 0) & (True if quarantined is None else ~quarantined))


def _check_lengths(packing: PackingConfig, fields: Fields, planned: Sequence[int], sample: int) -> None:
    sides = packing.objective.field_prefixes
    lengths = {name: len(values) for name, values in fields.items() if packing.field(name).per == "tokens"}
    if len(sides) == 1 and set(lengths.values()) == set(planned):
        return
    if any(length != planned[find_side(name, sides)] for name, length in lengths.items()):
        expected = ", ".join(map(str, planned))
        raise MegatfmError(f"the objective built sample {sample} with lengths {lengths}, not {expected}")


def _as_declared(fields: Mapping[str, Any], declared: Mapping[str, Field], sample: int) -> Fields:
    """Convert fields to arrays. Raises a MegatfmError if a name, type or shape differs from the declaration."""
    if fields.keys() != declared.keys():
        raise MegatfmError(
            f"the objective built sample {sample} with fields {sorted(fields)}, but its `fields` are {sorted(declared)}"
        )
    arrays = {name: np.asarray(values) for name, values in fields.items()}
    for name, values in arrays.items():
        field = declared[name]
        inner = values.shape[1:] if field.per == "tokens" else values.shape
        if values.dtype != field.dtype or inner != field.shape:
            length = "n, " if field.per == "tokens" else ""
            expected = f"{field.dtype} [{length}{', '.join(map(str, field.shape))}]"
            raise MegatfmError(
                f"the objective built sample {sample} with {name!r} = {values.dtype} {list(values.shape)}, but its "
                f"`fields` say {expected}"
            )
    return arrays


def _make_padding(objective: PackingObjective, planned_lengths: Sequence[int]) -> Fields:
    padding = {}
    for name, field in (objective.fields or {}).items():
        length = planned_lengths[find_side(name, objective.field_prefixes)]
        padding[name] = field.filled(length) if field.per == "tokens" else field.filled()
    return padding


def find_batch_build(objective: PackingObjective) -> BatchBuild | None:
    """Return the objective's `build_many`; None if it has none, or if a subclass overrides `build_example` alone."""
    for kind in type(objective).__mro__:
        if "build_many" in vars(kind):
            return objective.build_many  # type: ignore[attr-defined]
        if "build_example" in vars(kind):
            break
    return None


def build_batch(join: BatchBuild, chunks: ChunkTable, documents: DocumentSource) -> Mapping[str, NDArray[np.integer]]:
    """Join the documents of uncut chunks. Raises a MegatfmError if the length is not the planned one."""
    fields = join([documents[number] for number in chunks.documents.tolist()])
    for name, field in fields.items():
        if len(field) != chunks.lengths.sum():
            raise MegatfmError(
                f"the objective joined {len(chunks)} documents to {len(field)} {name}, not {chunks.lengths.sum()}"
            )
    return fields
