"""What packing asks of an objective, and packing by cutting: documents joined and cut into rows of equal length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.pieces import Pieces
from megatfm.errors import MegatfmError
from megatfm.keyed import PieceKey

IGNORED_TARGET = -100
"""The target of positions that count in no loss (torch's default `ignore_index`)."""
NO_DOCUMENT = -1
"""The document number of padding."""

Fields = dict[str, NDArray[np.int64]]


class Partners(Protocol):
    """The other documents of a block, those without tokens left out, in stored order."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Their numbers of tokens [n]."""
        ...

    def tokens(self, number: int) -> NDArray[np.integer]:
        """The tokens of one of them."""
        ...


class Objective(Protocol):
    """Makes sequences from pieces of documents; see `megatfm.objectives.Objective`."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Prefixes of the fields of each row that a sequence takes room in: ("",), or ("encoder_", "")."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Longest piece whose sequence fits a row; None: documents are not cut into pieces, but at row ends."""
        ...

    @property
    def fills(self) -> Mapping[str, int]:
        """What stands in padding, for fields where it is neither 0 nor what packing knows."""
        ...

    @property
    def needs_partners(self) -> bool:
        """Whether `build` looks at other documents."""
        ...

    def lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The lengths [n] or [n, sides] of the sequences of pieces of `n_tokens` [n]; 0: there is none."""
        ...

    def build(
        self, tokens: NDArray[np.integer], partners: Partners, key: PieceKey
    ) -> Mapping[str, NDArray[np.integer]]:
        """Integer fields [length of its side], "tokens" and "targets" among them; values must fit 32 bits."""
        ...


@dataclass(frozen=True)
class Others:
    """The documents of a block but for number `own`."""

    documents: Sequence[NDArray[Any]]
    own: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(self.documents[number]) for number in self._numbers], np.int64)

    def tokens(self, number: int) -> NDArray[np.integer]:
        return self.documents[self._numbers[number]]

    @cached_property
    def _numbers(self) -> list[int]:
        return [i for i, document in enumerate(self.documents) if i != self.own and len(document)]


def build_pieces(
    objective: Objective,
    pieces: Pieces,
    documents: Sequence[NDArray[Any]],
    first: int,
    seed: int,
    epoch: int,
    blank: NDArray[np.bool_],
    pad_id: int,
) -> list[dict[str, NDArray[np.integer]]]:
    """Build the sequence of each piece of a block's documents, the first of which has the number `first`.

    Those that are `blank` are built and then filled with padding; they are nobody's partners.
    Raises a MegatfmError that names the sample whose sequence has not the length that was planned.
    """
    built = []
    partners = [tokens[:0] if empty else tokens for tokens, empty in zip(documents, blank, strict=True)]
    for document, start, end, number, planned in pieces.rows():
        key = PieceKey(seed, epoch, first + document, number)
        fields = dict(objective.build(documents[document][start:end], Others(partners, document), key))
        for name, field in fields.items():
            if len(field) != planned[side_of(name, objective.sides)]:
                found = {name: len(field) for name, field in fields.items()}
                wanted = ", ".join(map(str, planned))
                raise MegatfmError(
                    f"the objective built sample {first + document} with lengths {found}, not {wanted}"
                )
        if blank[document]:
            for name, field in fields.items():
                fill = fill_of(name, objective.sides, objective.fills, pad_id)
                fields[name] = np.full(len(field), fill, np.int64)
        built.append(fields)
    return built


def side_of(field: str, sides: Sequence[str]) -> int:
    """Which side a field belongs to: the first whose prefix it has."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))


def fill_of(field: str, sides: Sequence[str], fills: Mapping[str, int], pad_id: int) -> int:
    """What stands in a field's padding."""
    bare = field.removeprefix(sides[side_of(field, sides)])
    return fills.get(field, {"tokens": pad_id, "targets": IGNORED_TARGET}.get(bare, 0))


@dataclass(frozen=True, eq=False)
class CutBlock:
    """`fields` [total] of the joined documents, which start at `starts` [n_documents]; cut only when read."""

    fields: dict[str, NDArray[np.int32]]
    starts: NDArray[np.int64]
    length: int
    fills: Mapping[str, int]
    blank: NDArray[np.bool_]
    """Which of them are padding [n_documents]."""

    @property
    def n_rows(self) -> int:
        return -(-len(self.fields["tokens"]) // self.length)

    @property
    def nbytes(self) -> int:
        own = sum(field.nbytes for field in self.fields.values())
        return own + 8 * len(self.fields["tokens"]) + self.starts.nbytes

    @cached_property
    def _numbers(self) -> NDArray[np.int32]:
        """Which document each token is of, in the block [total]."""
        lengths = np.diff(self.starts, append=len(self.fields["tokens"]))
        return np.repeat(np.arange(len(self.starts), dtype=np.int32), lengths)

    @cached_property
    def _places(self) -> NDArray[np.int32]:
        """Where in its document each token is [total]."""
        return (np.arange(len(self._numbers)) - self.starts[self._numbers]).astype(np.int32)

    def row(self, number: int, as_one_document: bool = False) -> Fields:
        """Row `number`: its slice of every field, with "documents" (0, 1, … in the row) and "positions"
        (from 0 in each piece of a document); past the end of the block there is padding."""
        total, length = len(self.fields["tokens"]), self.length
        part = slice(min(number * length, total), min((number + 1) * length, total))
        row = {name: padded(field[part], length, self.fills[name]) for name, field in self.fields.items()}
        numbers = self._numbers[part]
        positions = np.arange(len(numbers), dtype=np.int32)
        if as_one_document:
            documents = np.zeros_like(numbers)
        else:
            documents, positions = numbers - numbers[:1], np.minimum(positions, self._places[part])
        if self.has_blank:
            blank = self.blank[numbers]
            documents, positions = np.where(blank, NO_DOCUMENT, documents), np.where(blank, 0, positions)
        row["documents"] = padded(documents, length, NO_DOCUMENT)
        row["positions"] = padded(positions, length, 0)
        return row

    @cached_property
    def has_blank(self) -> bool:
        return bool(self.blank.any())


def cut_rows(
    built: Sequence[Mapping[str, NDArray[np.integer]]],
    objective: Objective,
    length: int,
    pad_id: int,
    blank: NDArray[np.bool_],
) -> CutBlock:
    """Join built documents, in the order given; empty ones take no place. blank [n]: those that are padding."""
    lengths = np.array([len(document["tokens"]) for document in built], np.int64)
    starts = np.cumsum(lengths) - lengths
    fields = {name: joined([d[name] for d in built], name) for name in built[0]}
    fills = {name: fill_of(name, objective.sides, objective.fills, pad_id) for name in fields}
    return CutBlock(fields, starts[lengths > 0], length, fills, blank[lengths > 0])


def joined(pieces: Sequence[NDArray[np.integer]], name: str) -> NDArray[np.int32]:
    """One array [total] of a field's pieces."""
    whole = np.concatenate(pieces)
    narrow = whole.astype(np.int32)
    if not np.array_equal(narrow, whole):
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return narrow


def padded(values: NDArray[np.integer], length: int, fill: int) -> NDArray[np.int64]:
    """`values` and then `fill`, [length]."""
    if len(values) == length:
        return values.astype(np.int64)
    row = np.empty(length, np.int64)
    row[: len(values)] = values
    row[len(values) :] = fill
    return row
