"""The sequences that an objective builds, held against what was planned and declared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import DocumentChunk, Field, Fields, PackingConfig, PackingObjective, prefix_index
from megatfm.data.pieces import ChunkTable
from megatfm.errors import MegatfmError
from megatfm.keyed import PieceKey

BatchBuild = Callable[[Sequence[NDArray[Any]]], Mapping[str, NDArray[np.integer]]]
"""The fields of many documents, each framed as `PackingObjective.build` would, one after another [total]."""


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
        """Which of them [D] are to become padding."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    def members(self, number: int) -> Mapping[str, bytes]:
        """The files that are stored with a document."""
        ...


@dataclass(frozen=True, eq=False)
class PartnerDocuments:
    """The documents `known` [K] but for number `own`."""

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

    Those that are `blank` become padding of the same length; they are nobody's partners. Raises a MegatfmError that
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
        tokens, others = documents[document][start:end], PartnerDocuments(documents, partners, document)
        fields = dict(
            objective.build_example(DocumentChunk(tokens, others, documents.members(document)), key)
        )
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
        found = {name: len(values) for name, values in of_tokens.items()}
        wanted = ", ".join(map(str, planned_lengths))
        raise MegatfmError(f"the objective built sample {sample} with lengths {found}, not {wanted}")


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
