"""A checkpoint's `metadata.json`: the stored tensors and their files, under a hash of its own.

`{"blake3": HASH, "metadata": BODY}`: the hash covers the bytes of BODY, so that every flipped bit is found. BODY lists
tensors by groups with the same dtype, shape and sharding, such as the layers of a model. So its size grows with
names + groups × ranks, not with names × ranks. Schema 1, which listed each piece of each tensor, can still be read.
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
    format_first_error,
)
from megatfm.checkpoint.sharded_tensor import check_cover
from megatfm.errors import MegatfmError
from megatfm.version import __version__

METADATA_FILENAME = "metadata.json"
SCHEMA = 2


class NewerFormatError(MegatfmError):
    """Raised for a checkpoint of a later format, which is intact: it must be neither skipped nor replaced."""


class StoredPiece(NamedTuple):
    """One stored block of one tensor: its location in the tensor, its file, and its key in the file."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


Run = tuple[Count, Annotated[int, Field(strict=True, gt=0)]]
"""Index of a file in `Metadata.files`, and the number of consecutive names of a group that are in it."""


class Piece(StrictModel):
    """One block of every tensor of a group. runs: files that hold it, in the order of the group's names."""

    offsets: tuple[Count, ...]
    sizes: Shape
    runs: tuple[Run, ...]


class TensorGroup(StrictModel):
    """Tensors with the same dtype, shape and sharding, and the pieces of each."""

    dtype: DType
    shape: Shape
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    pieces: tuple[Piece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return DTYPES[self.dtype]

    def count_bytes(self, piece: Piece) -> int:
        """Return the bytes of a piece of one tensor."""
        return prod(piece.sizes) * self.torch_dtype.itemsize

    @cached_property
    def _run_ends(self) -> list[list[int]]:
        return [list(accumulate(count for _, count in piece.runs)) for piece in self.pieces]

    def find_file_index(self, piece_index: int, name_index: int) -> int:
        """Return the index of the file that holds a piece of a tensor."""
        run = bisect_right(self._run_ends[piece_index], name_index)
        return self.pieces[piece_index].runs[run][0]

    def get_stored_piece(self, piece_index: int, name_index: int, files: Sequence[str]) -> StoredPiece:
        """Return a piece of a tensor. files: of the checkpoint, in order."""
        name, piece = self.names[name_index], self.pieces[piece_index]
        file = files[self.find_file_index(piece_index, name_index)]
        key = make_piece_key(name, self.shape, piece.offsets, piece.sizes)
        return StoredPiece(name, self.torch_dtype, piece.offsets, piece.sizes, file, key)


class Metadata(StrictModel):
    """Contents of a checkpoint without the tensors' values. state: the caller's JSON."""

    format: Literal["megatfm-checkpoint"] = "megatfm-checkpoint"
    schema_version: Literal[2] = 2
    step: Count
    state: dict[str, JsonValue]
    groups: tuple[TensorGroup, ...]
    files: dict[FileName, FileEntry]

    def tensor_specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return name → dtype and global shape, sorted by name."""
        specs = {name: (group.torch_dtype, group.shape) for group in self.groups for name in group.names}
        return dict(sorted(specs.items()))

    @cached_property
    def file_names(self) -> list[str]:
        """Names of the files, in the order of the indices of runs."""
        return list(self.files)

    @cached_property
    def group_and_index(self) -> dict[str, tuple[TensorGroup, int]]:
        """Name → its group, and its index in the group's names."""
        return {name: (group, i) for group in self.groups for i, name in enumerate(group.names)}

    def iter_pieces_in(self, files: Collection[str]) -> Iterator[StoredPiece]:
        """Yield all pieces that some files hold."""
        file_indices = {i for i, name in enumerate(self.file_names) if name in files}
        for group in self.groups:
            for piece_index, piece in enumerate(group.pieces):
                for name_index in list_positions(piece.runs, file_indices):
                    yield group.get_stored_piece(piece_index, name_index, self.file_names)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        bytes_in = [0] * len(self.files)
        for group in self.groups:
            check_cover(group.names[0], group.shape, [(piece.offsets, piece.sizes) for piece in group.pieces])
            for piece in group.pieces:
                size = group.count_bytes(piece)
                if sum(count for _, count in piece.runs) != len(group.names):
                    raise MegatfmError(
                        f"tensor {group.names[0]}: the files of its piece at {piece.offsets} hold another number of "
                        f"tensors than the {len(group.names)} of its group"
                    )
                for file_index, count in piece.runs:
                    if file_index >= len(bytes_in):
                        raise MegatfmError(f"it places tensors in file {file_index}, which it doesn't list")
                    bytes_in[file_index] += count * size
        if len(self.group_and_index) < (total := sum(len(group.names) for group in self.groups)):
            raise MegatfmError(f"it lists {total - len(self.group_and_index)} tensors twice")
        for (file, entry), size in zip(self.files.items(), bytes_in, strict=True):
            if size > entry.bytes:
                raise MegatfmError(f"it places {size} bytes of tensors in {file}, which has {entry.bytes}")
        return self


def make_piece_key(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the key of a piece in its file: the tensor's name, and the slice unless it is the full tensor."""
    if tuple(sizes) == tuple(shape):
        return name
    slices = ",".join(f"{start}:{start + size}" for start, size in zip(offsets, sizes, strict=True))
    return f"{name}[{slices}]"


def check_json_round_trip(state: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a copy of the state. Raises MegatfmError if JSON would change it (tuples, NaN, keys that are no
    strings)."""
    plain: dict[str, JsonValue] = {}
    for key, value in state.items():
        try:
            plain[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise MegatfmError(f"state {key!r} can't be stored as JSON: {error}") from error
        if not isinstance(key, str) or not _are_json_equal(value, plain[key]):
            raise MegatfmError(
                f"state {key!r} would change in a JSON round trip: use lists, text keys and plain numbers"
            )
    return plain


def _are_json_equal(a: object, b: object) -> bool:
    """Return whether two JSON values are equal including their types: 1, 1.0 and True are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_are_json_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_are_json_equal, a, b))
    return a == b


def encode_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of `metadata.json`; equal metadata gives equal bytes."""
    body = json.dumps(metadata.model_dump(), allow_nan=False).encode()
    return _make_metadata_head(body) + body + b"}\n"


def _make_metadata_head(body: bytes) -> bytes:
    return b'{"blake3": "%s", "metadata": ' % blake3(body).hexdigest().encode()


def read_metadata(folder: Path) -> Metadata:
    """Read and check a checkpoint's metadata. Raises MegatfmError with the file and its fault."""
    return parse_metadata(folder, file_io.read_file(folder / METADATA_FILENAME))


def parse_metadata(folder: Path, raw: bytes) -> Metadata:
    """Parse and check the bytes of a `metadata.json`. folder: named in errors. Raises like `read_metadata`."""
    path = folder / METADATA_FILENAME
    length = len(_make_metadata_head(b""))
    head, body, tail = raw[:length], raw[length:-2], raw[-2:]
    if head[:12] != _make_metadata_head(b"")[:12] or tail != b"}\n":
        raise MegatfmError(f"{path} is not a checkpoint's metadata, or was cut short")
    if head != _make_metadata_head(body):
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
            f"which reads 1 to {SCHEMA}: use that version"
        )
    if type(schema) is not int or schema < 1:
        raise MegatfmError(f"{path} has schema version {schema!r:.40}, but this megatfm reads 1 to {SCHEMA}")
    try:
        if schema == SCHEMA:
            return Metadata.model_validate(content)
        return _upgrade_from_v1(_MetadataV1.model_validate(content))
    except ValidationError as error:
        raise MegatfmError(f"{path} is not valid: {format_first_error(error)}") from error
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
    """Format until 2026-11, which listed each piece of each tensor."""

    format: Literal["megatfm-checkpoint"]
    schema_version: Literal[1]
    step: Count
    state: dict[str, JsonValue]
    tensors: dict[str, _TensorV1]
    files: dict[FileName, FileEntry]


def _upgrade_from_v1(old: _MetadataV1) -> Metadata:
    """Convert metadata of schema 1. Raises MegatfmError if it contradicts itself."""
    files = dict(sorted(old.files.items()))
    file_index = {name: i for i, name in enumerate(files)}
    # (dtype, shape, regions) → name → index of the file of each region
    groups: dict[tuple[Any, ...], dict[str, list[int]]] = defaultdict(dict)
    for name, tensor in sorted(old.tensors.items()):
        for piece in tensor.pieces:
            if piece.file not in file_index:
                raise MegatfmError(f"it places tensors in {piece.file}, which it doesn't list")
            key = make_piece_key(name, tensor.shape, piece.offsets, piece.sizes)
            if piece.key != key:
                raise MegatfmError(f"tensor {name}: its piece {key} has the key {piece.key!r:.80}")
        pieces = sorted(tensor.pieces, key=lambda piece: (piece.offsets, piece.sizes))
        regions = tuple((piece.offsets, piece.sizes) for piece in pieces)
        groups[tensor.dtype, tensor.shape, regions][name] = [file_index[piece.file] for piece in pieces]
    tensor_groups = []
    for (dtype, shape, regions), members in groups.items():
        group_pieces = tuple(
            Piece(offsets=offsets, sizes=sizes, runs=encode_runs(indices[i] for indices in members.values()))
            for i, (offsets, sizes) in enumerate(regions)
        )
        tensor_groups.append(TensorGroup(dtype=dtype, shape=shape, names=tuple(members), pieces=group_pieces))
    return Metadata(step=old.step, state=old.state, groups=tuple(tensor_groups), files=files)


def list_positions(runs: Iterable[tuple[int, int]], numbers: Collection[int]) -> list[int]:
    """Return the positions of some numbers in what `encode_runs` has encoded: of 5 in (3, 2), (5, 1), position 2."""
    positions: list[int] = []
    start = 0
    for number, count in runs:
        if number in numbers:
            positions += range(start, start + count)
        start += count
    return positions


def encode_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Run-length encode numbers: 3, 3, 5 → (3, 2), (5, 1)."""
    return tuple((number, len(list(equal))) for number, equal in groupby(numbers))
