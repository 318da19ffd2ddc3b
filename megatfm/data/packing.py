"""What packing asks of an objective, and what it gives it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError, UsageError
from megatfm.keyed import PieceKey

IGNORE_INDEX = -100
"""The target of positions that count in no loss (torch's default `ignore_index`)."""
PAD_DOCUMENT_ID = -1
"""The document number of padding."""

Fields = dict[str, NDArray[Any]]


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
    """What an objective makes a sequence of: the tokens [n] of a piece of a document, and what belongs to it.

    files: the files stored with the document, by extension (`jpg`, `cls`), where the objective `needs_files`.
    """

    tokens: NDArray[np.integer]
    other_documents: OtherDocuments = NO_OTHER_DOCUMENTS()
    files: Mapping[str, bytes] = default(default_factory=dict)


@dataclass(frozen=True)
class Field:
    """A field of a sequence: its NumPy type, and its shape [length, *shape], or [*shape] where it is one `of` the row.

    pad_value: what stands in padding.
    """

    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    per: Literal["tokens", "row"] = "tokens"
    pad_value: float = 0

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
        """What stands in padding, for fields where it is neither 0 nor what packing knows."""
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
    """How documents become rows."""

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
        """What a field is: as the objective says, or integers [length]."""
        declared = self.objective.fields
        return Field(pad_value=self._fill(name)) if declared is None else declared[name]

    def _fill(self, name: str) -> int:
        sides = self.objective.field_prefixes
        bare = name.removeprefix(sides[prefix_index(name, sides)])
        return self.objective.padding_values.get(
            name, {"tokens": self.pad_id, "targets": IGNORE_INDEX}.get(bare, 0)
        )

    def fills(self, names: Iterable[str], side: int = 0) -> dict[str, float]:
        """What stands in the padding of each of a side's fields, and of those that packing adds."""
        prefix = self.objective.field_prefixes[side]
        own = {name: self.field(name).pad_value for name in names}
        return own | {f"{prefix}documents": PAD_DOCUMENT_ID, f"{prefix}positions": 0}


def needs_own_row(objective: PackingObjective) -> bool:
    """Whether each sequence has a row of its own, since it has fields of the row."""
    return any(field.per == "row" for field in (objective.fields or {}).values())


def prefix_index(field: str, sides: Sequence[str]) -> int:
    """Which side a field belongs to: the first whose prefix it has."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))


def check_same_fields(name: str, rows: Fields, others: Fields) -> None:
    """Raise a UsageError that begins with `name` unless rows have the fields of others, in their types and shapes."""
    kinds, expected = (
        {field: f"{values.dtype}{list(values.shape[1:])}" for field, values in sorted(each.items())}
        for each in (rows, others)
    )
    if kinds != expected:
        raise UsageError(
            f"{name}: its rows are {kinds}, those of others {expected}: give all sources the same objective and row "
            "lengths"
        )


def join_rows(parts: Sequence[Fields]) -> Fields:
    """Concatenate rows by field. Raises a UsageError if the parts have unlike fields, as sources of a mixture may."""
    for part in parts[1:]:
        check_same_fields("data.mixture", part, parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
