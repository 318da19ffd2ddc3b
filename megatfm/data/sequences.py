"""Sequences: how documents are cut into pieces, and what an objective makes of each.

`PackingObjective` is what packing asks of an objective. `split_documents` tells the lengths of all sequences before any
text is read; `build_sequences` builds them, and holds each against the length and the fields that were promised.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError, SampleError
from megatfm.rng import PieceKey, piece_keys

IGNORE_INDEX = -100
"""The target of positions that count in no loss (torch's default `ignore_index`)."""
PAD_DOCUMENT_ID = -1
"""The document number of padding."""
Fields = dict[str, NDArray[Any]]
BatchBuild = Callable[[Sequence[NDArray[Any]]], Mapping[str, NDArray[np.integer]]]
"""The fields of many documents, each framed as `PackingObjective.build` would, one after another [total]."""
ImageLengths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Lengths [D] of sequences by heights and widths of images [D, 2]."""


class OtherDocuments(Protocol):
    """The other documents of a group of blocks, those without tokens left out, in stored order."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Their numbers of tokens [n]."""
        ...

    def tokens(self, number: int) -> NDArray[np.integer]:
        """The tokens of one of them."""
        ...


@dataclass(frozen=True)
class NO_OTHER_DOCUMENTS:
    """No other documents."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)

    def tokens(self, number: int) -> NDArray[np.integer]:
        raise IndexError(number)


@dataclass(frozen=True, eq=False)
class DocumentChunk:
    """A piece of a document, of which an objective makes a sequence: its tokens [n], and what belongs to it.

    files: the files stored with the document, by extension (`jpg`, `cls`), where the objective `needs_files`.
    """

    tokens: NDArray[np.integer]
    other_documents: OtherDocuments = NO_OTHER_DOCUMENTS()
    files: Mapping[str, bytes] = default(default_factory=dict)


@dataclass(frozen=True)
class Field:
    """A field of a sequence: its NumPy type, and its shape [length, *shape], or [*shape] where it is one `of` the row.

    pad_value: the content of padding, a number or an array of the field's shape.
    """

    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    per: Literal["tokens", "row"] = "tokens"
    pad_value: float | tuple[float, ...] = 0

    def filled(self, *lengths: int) -> NDArray[Any]:
        """An array [*lengths, *shape] of nothing but padding."""
        return np.full((*lengths, *self.shape), self.pad_value, np.dtype(self.dtype))


class PackingObjective(Protocol):
    """Makes sequences from pieces of documents; see `megatfm.objectives.Objective`."""

    @property
    def field_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the fields of each row that a sequence takes room in: ("",), or ("encoder_", "")."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Longest piece whose sequence fits a row; None: documents are not cut into pieces, but at row ends."""
        ...

    @property
    def padding_values(self) -> Mapping[str, int]:
        """Padding values of fields where it is neither 0 nor what packing knows."""
        ...

    @property
    def fields(self) -> Mapping[str, Field] | None:
        """All fields that `build` makes; None: whatever it makes, integers [length of the side]."""
        ...

    @property
    def needs_other_documents(self) -> bool:
        """Whether `build` looks at other documents."""
        ...

    @property
    def needs_files(self) -> bool:
        """Whether `build` looks at the files that are stored with a document."""
        ...

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The lengths [n] or [n, sides] of the sequences of pieces of `n_tokens` [n]; 0: there is none."""
        ...

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Mapping[str, NDArray[Any]]:
        """The fields of a piece's sequence, as `fields` says; integers [length] must fit 32 bits."""
        ...


@dataclass(frozen=True)
class PackingConfig:
    """Settings by which documents become rows."""

    objective: PackingObjective
    row_lengths: tuple[int, ...]
    """One for each of the objective's sides."""
    seed: int
    pad_id: int = 0
    attend_across_documents: bool = False
    """Whether what is in a row has one number and counts its positions on."""

    def __post_init__(self) -> None:
        if needs_own_row(self.objective) and self.objective.max_tokens is None:
            raise MegatfmError(
                "the objective has fields of rows, so its sequences can't be cut at row ends: give it max_tokens"
            )

    def field(self, name: str) -> Field:
        """Return the declaration of a field: the objective's, or integers [length]."""
        declared = self.objective.fields
        return Field(pad_value=self._fill(name)) if declared is None else declared[name]

    def _fill(self, name: str) -> int:
        sides = self.objective.field_prefixes
        bare = name.removeprefix(sides[prefix_index(name, sides)])
        return self.objective.padding_values.get(
            name, {"tokens": self.pad_id, "targets": IGNORE_INDEX}.get(bare, 0)
        )

    def fills(self, names: Iterable[str], side: int = 0) -> dict[str, float]:
        """Return the padding values of each of a side's plain fields, and of those that packing adds."""
        prefix = self.objective.field_prefixes[side]
        pad_values: dict[str, float] = {name: self.field(name).pad_value for name in names}  # type: ignore[misc]
        return pad_values | {f"{prefix}documents": PAD_DOCUMENT_ID, f"{prefix}positions": 0}


def needs_own_row(objective: PackingObjective) -> bool:
    """Whether each sequence has a row of its own, since it has fields of the row."""
    return any(field.per == "row" for field in (objective.fields or {}).values())


def prefix_index(field: str, sides: Sequence[str]) -> int:
    """Return the side of a field: the first whose prefix it has."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Consecutive pieces of consecutive documents, in stored order. All arrays are [P]."""

    documents: NDArray[np.int64]
    """The document of each, counted from the first one given."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """0, 1, … in each document."""
    lengths: NDArray[np.int64]
    """Lengths of the sequences that will be built, [P, sides]."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        columns = (self.documents, self.starts, self.ends, self.numbers, self.lengths)
        return sum(column.nbytes for column in columns)

    def iter_chunks(self) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Document, start, end, number and lengths of each piece, as plain numbers."""
        columns = (self.documents, self.starts, self.ends, self.numbers, self.lengths)
        return zip(*(column.tolist() for column in columns), strict=True)

    def without_empty(self) -> "ChunkTable":
        """The pieces that make a sequence: a side of them has tokens."""
        return self.take(np.flatnonzero(self.lengths.any(axis=1)))

    def take(self, chosen: NDArray[np.integer]) -> "ChunkTable":
        """Some of them, in the order given."""
        return ChunkTable(
            self.documents[chosen],
            self.starts[chosen],
            self.ends[chosen],
            self.numbers[chosen],
            self.lengths[chosen],
        )


def split_documents(
    n_tokens: NDArray[np.int64],
    objective: PackingObjective,
    first: int,
    seed: int,
    image_sizes: Callable[[], NDArray[np.int64]] | None = None,
) -> ChunkTable:
    """Cut documents of `n_tokens` [D], the first of which has the number `first` in its corpus.

    image_sizes: gives heights and widths [D, 2], for an objective whose lengths depend on them.

    A document is cut into consecutive pieces of `objective.max_tokens`, of which the last may be shorter; an empty
    document is one empty piece. Pieces that make no sequence are among them, with lengths of 0.
    """
    most = objective.max_tokens
    if most is None:
        documents = np.arange(len(n_tokens))
        numbers, starts, ends = np.zeros_like(documents), np.zeros_like(documents), n_tokens
    else:
        counts = np.maximum(-(-n_tokens // most), 1)
        documents = np.repeat(np.arange(len(n_tokens)), counts)
        numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = numbers * most
        ends = np.minimum(starts + most, n_tokens[documents])
    image_lengths: ImageLengths | None = getattr(objective, "image_lengths", None)
    if image_sizes is not None and image_lengths is not None:
        lengths = image_lengths(image_sizes())[documents]
    else:
        keys = piece_keys(seed, first + documents, numbers)
        lengths = np.asarray(objective.sequence_lengths(ends - starts, keys), np.int64)
    return ChunkTable(documents, starts, ends, numbers, lengths.reshape(len(documents), -1))


class DocumentSource(Protocol):
    """Documents in stored order, of which the first has the number `first` in its corpus."""

    @property
    def first(self) -> int: ...
    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each [D]."""
        ...

    @property
    def is_quarantined(self) -> NDArray[np.bool_] | None:
        """Mask [D] of those that are to become padding."""
        ...

    @property
    def image_sizes(self) -> NDArray[np.int64]:
        """Height and width of the image of each [D, 2], where the objective asks for them."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    def members(self, number: int) -> Mapping[str, bytes]:
        """The files that are stored with a document."""
        ...

    def describe(self, number: int) -> tuple[str, str]:
        """Where a document is stored, in words, and how to train without it."""
        ...


@dataclass(frozen=True, eq=False)
class PartnerDocuments:
    """The candidate documents [K] but for number `excluded`."""

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


def build_sequences(
    how: PackingConfig, pieces: ChunkTable, documents: DocumentSource, epoch: int
) -> list[Fields]:
    """Build the sequence of each piece of documents.

    Documents in quarantine become padding of the same length; they are nobody's partners. Raises a MegatfmError that
    names the sample whose sequence is not what was planned and declared.
    """
    built, objective, first = [], how.objective, documents.first
    blank = (
        np.zeros(len(documents), np.bool_) if documents.is_quarantined is None else documents.is_quarantined
    )
    partners = np.flatnonzero((documents.lengths > 0) & ~blank)
    for document, start, end, number, planned_lengths in pieces.iter_chunks():
        if blank[document] and objective.fields is not None:
            built.append(_declared_padding(objective, planned_lengths))
            continue
        key = PieceKey(how.seed, epoch, first + document, number)
        tokens = documents[document][start:end]
        partner_documents = PartnerDocuments(documents, partners, document)
        chunk = DocumentChunk(tokens, partner_documents, documents.members(document))
        try:
            fields = dict(objective.build_example(chunk, key))
        except SampleError as error:
            place, remedy = documents.describe(document)
            raise MegatfmError(f"{place} {error}{remedy}") from error
        if objective.fields is not None:
            fields = _as_declared(fields, objective.fields, first + document)
        _check_lengths(how, fields, planned_lengths, first + document)
        if blank[document]:
            fields = {name: how.field(name).filled(len(field)) for name, field in fields.items()}
        built.append(fields)
    return built


def _check_lengths(how: PackingConfig, fields: Fields, planned_lengths: Sequence[int], sample: int) -> None:
    sides = how.objective.field_prefixes
    of_tokens = {name: values for name, values in fields.items() if how.field(name).per == "tokens"}
    if any(len(values) != planned_lengths[prefix_index(name, sides)] for name, values in of_tokens.items()):
        built_lengths = {name: len(values) for name, values in of_tokens.items()}
        wanted = ", ".join(map(str, planned_lengths))
        raise MegatfmError(f"the objective built sample {sample} with lengths {built_lengths}, not {wanted}")


def _as_declared(fields: Mapping[str, Any], declared: Mapping[str, Field], sample: int) -> Fields:
    """The fields as arrays of the types and shapes that the objective says."""
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
            wanted = f"{field.dtype} [{length}{', '.join(map(str, field.shape))}]"
            raise MegatfmError(
                f"the objective built sample {sample} with {name!r} = {values.dtype} {list(values.shape)}, but its "
                f"`fields` say {wanted}"
            )
    return arrays


def _declared_padding(objective: PackingObjective, planned_lengths: Sequence[int]) -> Fields:
    return {
        name: field.filled(
            *(
                [planned_lengths[prefix_index(name, objective.field_prefixes)]]
                if field.per == "tokens"
                else []
            )
        )
        for name, field in (objective.fields or {}).items()
    }


def batch_build_of(objective: PackingObjective) -> BatchBuild | None:
    """An objective's `build_many`, if it has one that goes with its `build_example`: a subclass may have changed
    that alone."""
    for kind in type(objective).__mro__:
        if "build_many" in vars(kind):
            return objective.build_many  # type: ignore[attr-defined]
        if "build_example" in vars(kind):
            break
    return None


def build_batch(
    join: BatchBuild, pieces: ChunkTable, documents: DocumentSource
) -> Mapping[str, NDArray[np.integer]]:
    """Join the documents of uncut pieces. Raises a MegatfmError if they have not the length that was planned."""
    fields = join([documents[number] for number in pieces.documents.tolist()])
    for name, field in fields.items():
        if len(field) != pieces.lengths.sum():
            raise MegatfmError(
                f"the objective joined {len(pieces)} documents to {len(field)} {name}, not {pieces.lengths.sum()}"
            )
    return fields
