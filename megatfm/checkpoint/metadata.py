"""A checkpoint's `metadata.json`: what is stored, in which files, under a hash of its own.

`{"blake3": HASH, "metadata": BODY}`: the hash covers the bytes of BODY as they stand, so that no flipped bit passes.
BODY lists tensors by groups: all that have the same dtype and shape and are cut alike, as the layers of a model are.
Its size so grows with names + kinds of tensors × ranks, not with tensors × ranks. Schema 1 listed each piece of each
tensor; it is still read.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from blake3 import blake3
from pydantic import Field, JsonValue, ValidationError, model_validator

from megatfm.checkpoint import file_io
from megatfm.checkpoint.file_format import (
    DTYPES,
    Count,
    DType,
    FileEntry,
    FileName,
    Shape,
    StrictModel,
    first_error,
)
from megatfm.checkpoint.sharded_tensor import check_cover
from megatfm.errors import MegatfmError
from megatfm.version import __version__

METADATA_FILENAME = "metadata.json"
SCHEMA = 2


class NewerFormatError(MegatfmError):
    """A checkpoint of a later format: sound, so it must be neither passed over nor put aside."""


class StoredPiece(NamedTuple):
    """One stored block of one tensor: where it lies in the tensor, and under which key of which file."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


Run = tuple[Count, Annotated[int, Field(strict=True, gt=0)]]
"""Number of a file, in the order of `Metadata.files`, and how many of a group's names follow that are in it."""


class Piece(StrictModel):
    """One block of every tensor of a group. runs: the files that have it, in the order of the group's names."""

    offsets: tuple[Count, ...]
    sizes: Shape
    runs: tuple[Run, ...]


class TensorGroup(StrictModel):
    """Tensors that have the same dtype and shape and are cut alike, and the pieces that make each of them up."""

    dtype: DType
    shape: Shape
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    pieces: tuple[Piece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    def bytes_of(self, piece: Piece) -> int:
        """The bytes of one piece of one of the tensors."""
        return prod(piece.sizes) * self.torch_dtype.itemsize

    @cached_property
    def _run_ends(self) -> list[list[int]]:
        return [list(accumulate(count for _, count in piece.runs)) for piece in self.pieces]

    def file_of(self, piece: int, place: int) -> int:
        """The number of the file that has a piece of the tensor at a place among the names."""
        return self.pieces[piece].runs[bisect_right(self._run_ends[piece], place)][0]

    def stored(self, piece: int, place: int, files: Sequence[str]) -> StoredPiece:
        """A piece of the tensor at a place among the names. files: of the checkpoint, in order."""
        name, (offsets, sizes) = self.names[place], (self.pieces[piece].offsets, self.pieces[piece].sizes)
        key = piece_key(name, self.shape, offsets, sizes)
        return StoredPiece(name, self.torch_dtype, offsets, sizes, files[self.file_of(piece, place)], key)


class Metadata(StrictModel):
    """Everything about a checkpoint but the tensors' values. `state` is the caller's own JSON."""

    format: Literal["megatfm-checkpoint"] = "megatfm-checkpoint"
    schema_version: Literal[2] = 2
    step: Count
    state: dict[str, JsonValue]
    groups: tuple[TensorGroup, ...]
    files: dict[FileName, FileEntry]

    def names(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor's dtype and global shape by name, sorted."""
        named = {name: (group.torch_dtype, group.shape) for group in self.groups for name in group.names}
        return dict(sorted(named.items()))

    @cached_property
    def file_names(self) -> list[str]:
        """The files in order, as runs number them."""
        return list(self.files)

    @cached_property
    def places(self) -> dict[str, tuple[TensorGroup, int]]:
        """Name → its group, and the place among that group's names."""
        return {name: (group, place) for group in self.groups for place, name in enumerate(group.names)}

    def pieces_in(self, files: Collection[str]) -> Iterator[StoredPiece]:
        """Yield all that some files hold."""
        numbers = {number for number, name in enumerate(self.file_names) if name in files}
        for group in self.groups:
            for index, piece in enumerate(group.pieces):
                start = 0
                for number, count in piece.runs:
                    if number in numbers:
                        for place in range(start, start + count):
                            yield group.stored(index, place, self.file_names)
                    start += count

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        bytes_in = [0] * len(self.files)
        for group in self.groups:
            check_cover(group.names[0], group.shape, [(piece.offsets, piece.sizes) for piece in group.pieces])
            for piece in group.pieces:
                size = group.bytes_of(piece)
                if sum(count for _, count in piece.runs) != len(group.names):
                    raise MegatfmError(
                        f"tensor {group.names[0]}: the files of its piece at {piece.offsets} hold another number of "
                        f"tensors than the {len(group.names)} of its group"
                    )
                for number, count in piece.runs:
                    if number >= len(bytes_in):
                        raise MegatfmError(f"it places tensors in file {number}, which it doesn't list")
                    bytes_in[number] += count * size
        if len(self.places) < (total := sum(len(group.names) for group in self.groups)):
            raise MegatfmError(f"it lists {total - len(self.places)} tensors twice")
        for (file, entry), size in zip(self.files.items(), bytes_in, strict=True):
            if size > entry.bytes:
                raise MegatfmError(f"it places {size} bytes of tensors in {file}, which has {entry.bytes}")
        return self


def piece_key(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Name a piece inside its file: the tensor's own name where it is complete, else with the slice that it is."""
    if tuple(sizes) == tuple(shape):
        return name
    return (
        f"{name}[{','.join(f'{start}:{start + size}' for start, size in zip(offsets, sizes, strict=True))}]"
    )


def check_json_round_trip(state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a copy of the state; raise if JSON would change anything in it (tuples, NaN, keys that are no text)."""
    plain: dict[str, JsonValue] = {}
    for key, value in state.items():
        try:
            plain[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise MegatfmError(f"state {key!r} can't be stored as JSON: {error}") from error
        if not isinstance(key, str) or not _json_equal(value, plain[key]):
            raise MegatfmError(
                f"state {key!r} would not come back from JSON as it is: use lists, text keys and plain numbers"
            )
    return plain


def _json_equal(value: object, back: object) -> bool:
    """Return whether two JSON values are equal including their types: 1, 1.0 and True are three values."""
    if type(value) is not type(back):
        return False
    if isinstance(value, dict) and isinstance(back, dict):
        return list(value) == list(back) and all(_json_equal(value[key], back[key]) for key in value)
    if isinstance(value, list) and isinstance(back, list):
        return len(value) == len(back) and all(map(_json_equal, value, back))
    return value == back


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of `metadata.json`; equal metadata gives equal bytes."""
    body = json.dumps(metadata.model_dump(), allow_nan=False).encode()
    return _metadata_head(body) + body + b"}\n"


def _metadata_head(body: bytes) -> bytes:
    return b'{"blake3": "%s", "metadata": ' % blake3(body).hexdigest().encode()


def read_metadata(folder: Path) -> Metadata:
    """Read and check a checkpoint's metadata; raises MegatfmError that names the file and what is wrong."""
    return parse_metadata(folder, file_io.read_file(folder / METADATA_FILENAME))


def parse_metadata(folder: Path, raw: bytes) -> Metadata:
    """Check the bytes of a `metadata.json`; folder: which one errors name. Raises as `read_metadata`."""
    path = folder / METADATA_FILENAME
    length = len(_metadata_head(b""))
    head, body, tail = raw[:length], raw[length:-2], raw[-2:]
    if head[:12] != _metadata_head(b"")[:12] or tail != b"}\n":
        raise MegatfmError(f"{path} is not a checkpoint's metadata, or was cut short")
    if head != _metadata_head(body):
        raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path} is not JSON: {error}") from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if type(schema) is int and schema > SCHEMA:
        state = content.get("state")
        writer = state.get("megatfm") if isinstance(state, dict) else None
        raise NewerFormatError(
            f"{path} was written by a newer megatfm ({writer!s:.40}, schema version {schema}); this is {__version__}, "
            f"which reads 1 to {SCHEMA}: go on with that version"
        )
    if type(schema) is not int or schema < 1:
        raise MegatfmError(f"{path} has schema version {schema!r:.40}, but this megatfm reads 1 to {SCHEMA}")
    try:
        return (
            Metadata.model_validate(content)
            if schema == SCHEMA
            else _upgrade(_MetadataV1.model_validate(content))
        )
    except ValidationError as error:
        raise MegatfmError(f"{path} is not valid: {first_error(error)}") from error
    except (MegatfmError, RecursionError) as error:
        raise MegatfmError(f"{path} is not valid: {error}") from error


# ------------------------------------------------------------------------------------------------ schema 1


class _PieceV1(StrictModel):
    offsets: tuple[Count, ...]
    sizes: Shape
    file: FileName
    key: str


class _TensorV1(StrictModel):
    dtype: DType
    shape: Shape
    pieces: tuple[_PieceV1, ...]


class _MetadataV1(StrictModel):
    """Format until 2026-11: each piece of each tensor by itself."""

    format: Literal["megatfm-checkpoint"]
    schema_version: Literal[1]
    step: Count
    state: dict[str, JsonValue]
    tensors: dict[str, _TensorV1]
    files: dict[FileName, FileEntry]


def _upgrade(old: _MetadataV1) -> Metadata:
    """Return the same in today's form. Raises MegatfmError where it contradicts itself."""
    files = dict(sorted(old.files.items()))
    numbers = {name: number for number, name in enumerate(files)}
    alike: dict[tuple[Any, ...], dict[str, list[int]]] = defaultdict(dict)
    for name, tensor in sorted(old.tensors.items()):
        for piece in tensor.pieces:
            if piece.file not in numbers:
                raise MegatfmError(f"it places tensors in {piece.file}, which it doesn't list")
            key = piece_key(name, tensor.shape, piece.offsets, piece.sizes)
            if piece.key != key:
                raise MegatfmError(f"tensor {name}: its piece {key} is said to be called {piece.key!r:.80}")
        pieces = sorted(tensor.pieces, key=lambda piece: (piece.offsets, piece.sizes))
        cuts = tuple((piece.offsets, piece.sizes) for piece in pieces)
        alike[tensor.dtype, tensor.shape, cuts][name] = [numbers[piece.file] for piece in pieces]
    groups = []
    for (dtype, shape, cuts), members in alike.items():
        pieces_of_group = [
            Piece(offsets=offsets, sizes=sizes, runs=run_lengths(held[index] for held in members.values()))
            for index, (offsets, sizes) in enumerate(cuts)
        ]
        groups.append(
            TensorGroup(dtype=dtype, shape=shape, names=tuple(members), pieces=tuple(pieces_of_group))
        )
    return Metadata(step=old.step, state=old.state, groups=tuple(groups), files=files)


def run_lengths(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Equal neighbours counted: 3, 3, 5 → (3, 2), (5, 1)."""
    return tuple((number, len(list(equal))) for number, equal in groupby(numbers))
