"""`metadata.json`: what a checkpoint holds and where, under one hash of its own, in plain JSON.

The file is `{"blake3": HASH, "metadata": BODY}` and the hash covers the bytes of BODY as they stand, so that no
flipped bit of it passes. Everything read from it is checked before it is believed: a hash keeps away accidents,
not a forger.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from megatfm.checkpoint import disk
from megatfm.checkpoint.box import check_cover
from megatfm.errors import MegatfmError
from megatfm.version import __version__

FILENAME = "metadata.json"
SCHEMA = 1

# What can be stored, under the names that safetensors gives them.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Nothing that a path could hide in.
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,}-[0-9]{3,}\.safetensors$")]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**60)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return name


def _check_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(max(1, size) for size in shape) >= 2**60:  # beyond it, torch's own arithmetic overflows
        raise ValueError(f"absurd shape {shape}")
    return shape


DType = Annotated[str, AfterValidator(_check_dtype)]
Shape = Annotated[tuple[Count, ...], AfterValidator(_check_size)]


class NewerFormatError(MegatfmError):
    """A checkpoint of a later format: sound, so it must be neither passed over nor put aside."""


class StrictModel(BaseModel):
    """What is read from disk: nothing more than the fields that are declared, and nothing else in them."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(StrictModel):
    """A safetensors file: its size in bytes and the BLAKE3 of its content."""

    bytes: Count
    blake3: Hash


class Piece(StrictModel):
    """One stored block of a tensor: where it lies in the tensor, and under which key of which file."""

    offsets: tuple[Count, ...]
    sizes: Shape
    file: FileName
    key: str


class TensorEntry(StrictModel):
    """A tensor as a whole, and the pieces that make it up."""

    dtype: DType
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    def bytes_of(self, piece: Piece) -> int:
        """The bytes of one piece in its file."""
        return prod(piece.sizes) * self.torch_dtype.itemsize


class Metadata(StrictModel):
    """Everything about a checkpoint but the tensors' values. `state` is the caller's own JSON."""

    format: Literal["megatfm-checkpoint"] = "megatfm-checkpoint"
    schema_version: Literal[1] = 1
    step: Count
    state: dict[str, JsonValue]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]

    def names(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor's dtype and global shape by name."""
        return {name: (entry.torch_dtype, entry.shape) for name, entry in self.tensors.items()}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        held: dict[str, int] = defaultdict(int)
        for name, tensor in self.tensors.items():
            check_cover(name, tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces])
            for piece in tensor.pieces:
                held[piece.file] += tensor.bytes_of(piece)
        for file in {*held, *self.files}:
            if file not in self.files:
                raise MegatfmError(f"it places tensors in {file}, which it doesn't list")
            if held[file] > self.files[file].bytes:
                raise MegatfmError(
                    f"it places {held[file]} bytes of tensors in {file}, which has {self.files[file].bytes}"
                )
        return self


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
    """Whether two JSON values are equal including their types: 1, 1.0 and True are three values."""
    if type(value) is not type(back):
        return False
    if isinstance(value, dict) and isinstance(back, dict):
        return list(value) == list(back) and all(_json_equal(value[key], back[key]) for key in value)
    if isinstance(value, list) and isinstance(back, list):
        return len(value) == len(back) and all(map(_json_equal, value, back))
    return value == back


def encode(metadata: Metadata) -> bytes:
    """Return the bytes of `metadata.json`; equal metadata gives equal bytes."""
    body = json.dumps(metadata.model_dump(), allow_nan=False).encode()
    return _head(body) + body + b"}\n"


def _head(body: bytes) -> bytes:
    return b'{"blake3": "%s", "metadata": ' % blake3(body).hexdigest().encode()


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong, on one line: where, and what."""
    first = error.errors()[0]
    given = f", not {first['input']!r:.80}" if isinstance(first["input"], str | int | float) else ""
    return f"{'.'.join(map(str, first['loc'])) or 'content':.200}: {first['msg']:.200}{given}"


def read(folder: Path) -> Metadata:
    """Read and check a checkpoint's metadata; raises MegatfmError that names the file and what is wrong."""
    return parse(folder, disk.read_file(folder / FILENAME))


def parse(folder: Path, raw: bytes) -> Metadata:
    """The same, of the bytes that were read from a checkpoint's metadata."""
    path = folder / FILENAME
    length = len(_head(b""))
    head, body, tail = raw[:length], raw[length:-2], raw[-2:]
    if head[:12] != _head(b"")[:12] or tail != b"}\n":
        raise MegatfmError(f"{path} is not a checkpoint's metadata, or was cut short")
    if head != _head(body):
        raise MegatfmError(f"{path} is damaged: its content doesn't have its hash")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path} is not JSON: {error}") from error
    found = content.get("schema_version") if isinstance(content, dict) else None
    if type(found) is int and found > SCHEMA:
        state = content.get("state")
        writer = state.get("megatfm") if isinstance(state, dict) else None
        raise NewerFormatError(
            f"{path} was written by a newer megatfm ({writer!s:.40}, schema version {found}); this is {__version__}, "
            f"which reads {SCHEMA}: go on with that version"
        )
    if found != SCHEMA:
        raise MegatfmError(f"{path} has schema version {found!r:.40}, but this megatfm reads {SCHEMA}")
    try:
        return Metadata.model_validate(content)
    except ValidationError as error:
        raise MegatfmError(f"{path} is not valid: {first_error(error)}") from error
    except (MegatfmError, RecursionError) as error:
        raise MegatfmError(f"{path} is not valid: {error}") from error
