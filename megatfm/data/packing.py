"""What packing asks of an objective, and the sequences that it builds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
Join = Callable[[Sequence[NDArray[Any]]], Mapping[str, NDArray[np.integer]]]
"""The fields of many documents, each framed as `Objective.build` would, one after another [total]."""


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


@dataclass(frozen=True)
class Packing:
    """How documents become rows."""

    objective: Objective
    row_lengths: tuple[int, ...]
    """One for each of the objective's sides."""
    seed: int
    pad_id: int = 0
    as_one_document: bool = False
    """Whether what is in a row has one number and counts its positions on."""

    def fill(self, name: str) -> int:
        """What stands in a field's padding."""
        sides = self.objective.sides
        bare = name.removeprefix(sides[side_of(name, sides)])
        return self.objective.fills.get(name, {"tokens": self.pad_id, "targets": IGNORED_TARGET}.get(bare, 0))

    def fills(self, names: Iterable[str], side: int = 0) -> dict[str, int]:
        """What stands in the padding of each of a side's fields, and of those that packing adds."""
        prefix = self.objective.sides[side]
        own = {name: self.fill(name) for name in names}
        return own | {f"{prefix}documents": NO_DOCUMENT, f"{prefix}positions": 0}


def build_pieces(
    how: Packing,
    pieces: Pieces,
    documents: Sequence[NDArray[Any]],
    blank: NDArray[np.bool_],
    first: int,
    epoch: int,
) -> list[dict[str, NDArray[np.integer]]]:
    """Build the sequence of each piece of a block's documents, the first of which has the number `first`.

    Those that are `blank` are built and then filled with padding; they are nobody's partners.
    Raises a MegatfmError that names the sample whose sequence has not the length that was planned.
    """
    built, objective = [], how.objective
    partners = [tokens[:0] if empty else tokens for tokens, empty in zip(documents, blank, strict=True)]
    for document, start, end, number, planned in pieces.rows():
        key = PieceKey(how.seed, epoch, first + document, number)
        fields = dict(objective.build(documents[document][start:end], Others(partners, document), key))
        for name, field in fields.items():
            if len(field) != planned[side_of(name, objective.sides)]:
                found = {name: len(field) for name, field in fields.items()}
                wanted = ", ".join(map(str, planned))
                raise MegatfmError(
                    f"the objective built sample {first + document} with lengths {found}, not {wanted}"
                )
        if blank[document]:
            fields = {name: np.full(len(field), how.fill(name), np.int64) for name, field in fields.items()}
        built.append(fields)
    return built


def joiner(objective: Objective) -> Join | None:
    """An objective's `join`, if it has one that goes with its `build`: a subclass may have changed that alone."""
    for kind in type(objective).__mro__:
        if "join" in vars(kind):
            return objective.join  # type: ignore[attr-defined]
        if "build" in vars(kind):
            break
    return None


def join_documents(
    join: Join, pieces: Pieces, documents: Sequence[NDArray[Any]]
) -> Mapping[str, NDArray[np.integer]]:
    """Join the documents of uncut pieces. Raises a MegatfmError if they have not the length that was planned."""
    fields = join([documents[number] for number in pieces.documents.tolist()])
    for name, field in fields.items():
        if len(field) != pieces.lengths.sum():
            raise MegatfmError(
                f"the objective joined {len(pieces)} documents to {len(field)} {name}, not {pieces.lengths.sum()}"
            )
    return fields


def side_of(field: str, sides: Sequence[str]) -> int:
    """Which side a field belongs to: the first whose prefix it has."""
    return next(number for number, prefix in enumerate(sides) if field.startswith(prefix))
