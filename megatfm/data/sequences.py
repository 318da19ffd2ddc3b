"""The interface between packing and objectives: chunks of documents, fields of sequences, and `PackingObjective`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError
from megatfm.rng import ChunkKey

IGNORE_INDEX = -100
"""Target of positions that the loss ignores (torch's default `ignore_index`)."""
PAD_DOCUMENT_ID = -1
"""The document number of padding."""
BEGINS = "begins"
"""Field of a sequence [n]: nonzero at the first token of each document after the first.

Packing keeps the documents of a sequence in one row, and attention keeps them apart: a pair of answers, or the images
of one text. An objective with `max_tokens` marks them by this field, which packing removes, or by the field `parts`,
which the model also reads.
"""
Fields = dict[str, NDArray[Any]]


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
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers would change checkpoints
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
        bare = name.removeprefix(sides[find_side(name, sides)])
        return self.objective.padding_values.get(name, {"tokens": self.pad_id, "targets": IGNORE_INDEX}.get(bare, 0))

    def get_pad_values(self, names: Iterable[str], side: int = 0) -> dict[str, float]:
        """Return the padding value of each plain field of a side, and of the fields that packing adds."""
        prefix = self.objective.field_prefixes[side]
        pad_values: dict[str, float] = {name: self.field(name).pad_value for name in names}  # type: ignore[misc]
        return pad_values | {f"{prefix}documents": PAD_DOCUMENT_ID, f"{prefix}positions": 0}


def needs_own_row(objective: PackingObjective) -> bool:
    """Return True if the objective has fields with one value per row, so that each sequence needs its own row."""
    return any(field.per == "row" for field in (objective.fields or {}).values())


def find_side(field: str, sides: Sequence[str]) -> int:
    """Return the index of a field's side: the first side whose prefix the name starts with."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))


def split_inner_documents(
    fields: Fields, starts: NDArray[np.int64], is_padding: NDArray[np.bool_] | None, prefix: str = ""
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return document starts [n + 1] and a padding mask [n] for sequences at `starts` [P + 1].

    fields: joined fields of all sequences; `begins`, with the side's prefix, is removed from it. is_padding [P]: True
    for sequences that are padding.
    """
    begins = fields.pop(prefix + BEGINS, None)
    if begins is None:
        return starts, is_padding
    document_starts = np.union1d(starts, np.flatnonzero(begins))
    if is_padding is not None:
        is_padding = is_padding[starts.searchsorted(document_starts[:-1], side="right") - 1]
    return document_starts, is_padding


def split_parts(
    starts: NDArray[np.int64], parts: NDArray[np.integer] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split sequences that hold several documents: return document starts [n + 1] and the sequence of each [n].

    starts [P + 1]: starts of the sequences. parts [total]: the objective's field with the index of the document in its
    sequence; None: each sequence is one document.
    """
    if parts is None:
        return starts, np.arange(len(starts) - 1)
    inner = np.flatnonzero(np.diff(parts)) + 1
    document_starts = np.union1d(starts, inner)
    return document_starts, np.searchsorted(starts, document_starts[:-1], side="right") - 1
