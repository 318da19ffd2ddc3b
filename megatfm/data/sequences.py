"""Sequences: how documents are cut into chunks, and what an objective makes of each.

`PackingObjective` is the interface that packing needs from an objective. `split_documents` computes the lengths of all
sequences before any text is read. `build_sequences` builds them, and checks each against the planned length and the
declared fields.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.image_columns import ImageIndex
from megatfm.errors import MegatfmError, SampleError
from megatfm.rng import ChunkKey, chunk_keys

IGNORE_INDEX = -100
"""Target of positions that the loss ignores (torch's default `ignore_index`)."""
PAD_DOCUMENT_ID = -1
"""The document number of padding."""
Fields = dict[str, NDArray[Any]]
BatchBuild = Callable[[Sequence[NDArray[Any]]], Mapping[str, NDArray[np.integer]]]
"""Builds the concatenated fields [total] of many documents, equal to `PackingObjective.build_example` of each."""
ImageLengths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Computes sequence lengths [D] from the heights and widths of images [D, 2]."""
CountedLengths = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""Computes sequence lengths [D, sides] from the numbers of tokens and of images [D]."""


class OtherDocuments(Protocol):
    """The other non-empty documents of a group of blocks, in stored order."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Token counts [n]."""
        ...

    def tokens(self, number: int) -> NDArray[np.integer]:
        """Return the tokens of the document at index `number`."""
        ...


@dataclass(frozen=True)
class _NoOtherDocuments:
    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)

    def tokens(self, number: int) -> NDArray[np.integer]:
        raise IndexError(number)


NO_OTHER_DOCUMENTS: OtherDocuments = _NoOtherDocuments()


@dataclass(frozen=True, eq=False)
class DocumentChunk:
    """A chunk of a document, from which an objective builds a sequence: tokens [n], other documents and files.

    files: the files stored with the document, by extension (`jpg`, `cls`), where the objective `needs_files`.
    ends_document: whether its last token is the document's.
    """

    tokens: NDArray[np.integer]
    other_documents: OtherDocuments = NO_OTHER_DOCUMENTS
    files: Mapping[str, bytes] = default(default_factory=dict)
    ends_document: bool = True


@dataclass(frozen=True)
class Field:
    """A field of a sequence: its NumPy type, and its shape [length, *shape], or [*shape] for one value per row.

    pad_value: value of padding, a scalar or an array of the field's shape.
    """

    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    per: Literal["tokens", "row"] = "tokens"
    pad_value: float | tuple[float, ...] = 0

    def filled(self, *lengths: int) -> NDArray[Any]:
        """Return an array [*lengths, *shape] filled with padding."""
        return np.full((*lengths, *self.shape), self.pad_value, np.dtype(self.dtype))


class PackingObjective(Protocol):
    """Makes sequences from chunks of documents; see `megatfm.objectives.Objective`."""

    @property
    def field_prefixes(self) -> tuple[str, ...]:
        """Field prefix of each side of a row: ("",), or ("encoder_", "") for an encoder-decoder."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Longest chunk whose sequence fits a row; None: documents are joined and cut where rows end."""
        ...

    @property
    def padding_values(self) -> Mapping[str, int]:
        """Padding values of the fields whose padding is neither 0 nor a default of packing."""
        ...

    @property
    def fields(self) -> Mapping[str, Field] | None:
        """Declarations of all fields that `build_example` returns; None: all are integers [length of the side]."""
        ...

    @property
    def needs_other_documents(self) -> bool:
        """True if `build_example` reads other documents."""
        ...

    @property
    def needs_files(self) -> bool:
        """True if `build_example` reads the files stored with a document."""
        ...

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return sequence lengths [n] or [n, sides] for chunks of `n_tokens` [n]; 0: the chunk makes no sequence."""
        ...

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Mapping[str, NDArray[Any]]:
        """Build the fields of a chunk's sequence, as `fields` declares them; integers [length] must fit 32 bits."""
        ...


@dataclass(frozen=True)
class PackingConfig:
    """Settings for packing documents into rows."""

    objective: PackingObjective
    row_lengths: tuple[int, ...]
    """Row length of each side of the objective."""
    seed: int
    pad_id: int = 0
    attend_across_documents: bool = False
    """True if a row counts as one document: one document index, and positions that run through the row."""

    def __post_init__(self) -> None:
        if needs_own_row(self.objective) and self.objective.max_tokens is None:
            raise MegatfmError(
                "the objective has fields of rows, so its sequences can't be cut at row ends: give it max_tokens"
            )

    def field(self, name: str) -> Field:
        """Return the declaration of a field: the objective's, or integers [length]."""
        declared = self.objective.fields
        return Field(pad_value=self._get_pad_value(name)) if declared is None else declared[name]

    def _get_pad_value(self, name: str) -> int:
        sides = self.objective.field_prefixes
        bare = name.removeprefix(sides[prefix_index(name, sides)])
        return self.objective.padding_values.get(name, {"tokens": self.pad_id, "targets": IGNORE_INDEX}.get(bare, 0))

    def get_pad_values(self, names: Iterable[str], side: int = 0) -> dict[str, float]:
        """Return the padding value of each plain field of a side, and of the fields that packing adds."""
        prefix = self.objective.field_prefixes[side]
        pad_values: dict[str, float] = {name: self.field(name).pad_value for name in names}  # type: ignore[misc]
        return pad_values | {f"{prefix}documents": PAD_DOCUMENT_ID, f"{prefix}positions": 0}


def needs_own_row(objective: PackingObjective) -> bool:
    """Return True if the objective has fields with one value per row, so that each sequence needs its own row."""
    return any(field.per == "row" for field in (objective.fields or {}).values())


def prefix_index(field: str, sides: Sequence[str]) -> int:
    """Return the index of a field's side: the first side whose prefix the name starts with."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))


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
    n_tokens: NDArray[np.int64],
    objective: PackingObjective,
    first: int,
    seed: int,
    images: ImageIndex | None = None,
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
        others = NO_OTHER_DOCUMENTS if partners is None else PartnerDocuments(documents, partners, document)
        tokens = documents[document]
        chunk = DocumentChunk(tokens[start:end], others, documents.members(document), end == len(tokens))
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
    """Indices [K] of the documents with tokens; None for an objective that reads one document at a time."""
    if not objective.needs_other_documents:
        return None
    quarantined = documents.is_quarantined
    return np.flatnonzero((documents.lengths > 0) & (True if quarantined is None else ~quarantined))


def _check_lengths(packing: PackingConfig, fields: Fields, planned: Sequence[int], sample: int) -> None:
    sides = packing.objective.field_prefixes
    lengths = {name: len(values) for name, values in fields.items() if packing.field(name).per == "tokens"}
    if len(sides) == 1 and set(lengths.values()) == set(planned):
        return
    if any(length != planned[prefix_index(name, sides)] for name, length in lengths.items()):
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
        length = planned_lengths[prefix_index(name, objective.field_prefixes)]
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
