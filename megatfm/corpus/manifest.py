"""The manifest of a corpus: its shards, their hashes, its tokenizer and its provenance."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from blake3 import blake3
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from megatfm.corpus.files import RESTORE, get_regular_file_size, read_range, write_whole
from megatfm.errors import MegatfmError, UsageError

MANIFEST = "manifest.json"
SCHEMA_VERSION: Final = 1
SHARD_NAME = r"shard-\d{6,9}\.tar(\.zst)?"
INDEX_NAME = r"shard-\d{6,9}\.index\.zst"
FOREIGN_SHARD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.tar(\.zst)?"
FOREIGN_INDEX = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.index\.zst"

NO_TOKENIZER = "none"
"""The `tokenizer_hash` of a corpus that needs no tokenizer."""
MAX_SAMPLES_PER_BYTE = 64
"""Limit of samples per byte of a shard. It is above 1, since many documents share a member, which is compressed."""

DEFAULT_FRAME_BYTES = 2**18
"""Bytes after which a frame of a plain tar ends, if the manifest doesn't say."""

TokenDtype = Literal["uint16", "uint32"]
# Patterns of bare names: no path separator can match, so nothing outside the folder can be named.
ShardName = Annotated[str, StringConstraints(pattern=f"^{FOREIGN_SHARD}$")]
IndexName = Annotated[str, StringConstraints(pattern=f"^{FOREIGN_INDEX}$")]
Blake3 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class IndexFile(_Strict):
    """The sidecar index of a shard."""

    file: IndexName
    bytes: Count
    blake3: Blake3


class CorpusShard(_Strict):
    """One tar of samples; `text_bytes` counts the UTF-8 bytes that its tokens stand for."""

    file: ShardName
    bytes: Count
    blake3: Blake3
    samples: Annotated[int, Field(gt=0, lt=2**53)]
    tokens: Count
    text_bytes: Count
    index: IndexFile
    foreign: bool = False
    """Whether the shard was indexed in place, not written by `ShardWriter`."""
    files_only: bool = False
    """Samples are files alone, without an array of token ids."""
    frame_bytes: Annotated[int, Field(gt=0, lt=2**53)] = DEFAULT_FRAME_BYTES
    """Bytes after which a frame of a plain tar ends, since the tar itself doesn't mark frames."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        # A reader allocates memory by the number of samples; the file's size is checked before it is opened.
        if self.samples > MAX_SAMPLES_PER_BYTE * self.bytes:
            raise ValueError(f"{self.samples} samples can't lie in {self.bytes} bytes")
        if not self.foreign and not re.fullmatch(SHARD_NAME, self.file):
            raise ValueError(f"a shard is named like shard-000000.tar.zst or shard-000000.tar, not {self.file!r}")
        return self

    @model_serializer(mode="wrap")
    def _serialize_without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        defaults = {"foreign": False, "files_only": False, "frame_bytes": DEFAULT_FRAME_BYTES}
        return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}

    @property
    def is_raw(self) -> bool:
        """True if the shard is an uncompressed tar."""
        return self.file.endswith(".tar")


class Manifest(_Strict):
    """Everything that a reader must know before it opens a shard. Written last, so its presence is the commit."""

    schema_version: Literal[1] = SCHEMA_VERSION
    token_dtype: TokenDtype
    tokenizer_hash: Annotated[str, Field(min_length=1)]
    shards: Annotated[tuple[CorpusShard, ...], Field(min_length=1, strict=False)]
    provenance: dict[str, Any]

    @model_validator(mode="after")
    def _check_distinct_names(self) -> Self:
        names = [name for shard in self.shards for name in (shard.file, shard.index.file)]
        if len(set(names)) < len(names):
            raise ValueError("a file is listed twice")
        return self

    @model_validator(mode="after")
    def _check_class_names(self) -> Self:
        names = self.provenance.get("classes", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("provenance.classes is no list of names")
        return self

    @property
    def class_names(self) -> list[str]:
        """Names of images' classes in the order of their numbers; empty if they have none."""
        names: list[str] = self.provenance.get("classes", [])
        return names

    @property
    def dtype(self) -> np.dtype[Any]:
        """The tokens' type on disk, little-endian."""
        return np.dtype(self.token_dtype).newbyteorder("<")

    @property
    def fingerprint(self) -> str:
        """BLAKE3 hash of what determines the content and order of samples; the rest of the provenance is left out."""
        shards = [
            # Frames of the default size are left out, as before there were others.
            shard.blake3 if shard.frame_bytes == DEFAULT_FRAME_BYTES else [shard.blake3, shard.frame_bytes]
            for shard in self.shards
        ]
        content: list[Any] = [self.token_dtype, self.tokenizer_hash, shards]
        if any(shard.files_only for shard in self.shards):  # whose classes follow from a rule
            content.append([self.provenance.get("labels"), self.provenance.get("classes")])
        return blake3(json.dumps(content).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically, with sorted keys, so that equal manifests are equal bytes."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False)
        write_whole(folder / MANIFEST, f"{text}\n".encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read and validate `folder/manifest.json`. Raises a UsageError if it is missing, a MegatfmError if invalid."""
        if folder.is_file():
            raise UsageError(f"{folder}: is a file, not a corpus: make one of it with `megatfm prep`")
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder: write a corpus there with `megatfm prep`")
        path = folder / MANIFEST
        if not os.path.lexists(path):
            if parts := sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}")):
                advice = f"name one of them, for example {folder / parts[0]}"
                if parts != ["train", "validation"]:
                    advice += ", or give them weights in data.mixture.NAME.path"
                names = ", ".join(parts[:8]) + (" …" if len(parts) > 8 else "")
                raise UsageError(f"{folder}: holds a corpus for each of {names}: {advice}")
            if (corpora := _read_training_corpora(folder)) is not None:
                raise UsageError(
                    f"{folder}: is a run directory, not a corpus: look at it with `megatfm status {folder}`"
                    + "".join(f", and at what it reads with `megatfm data show {corpus}`" for corpus in corpora[:1])
                )
            raise UsageError(
                f"{folder}: has no {MANIFEST}, so it is no corpus, or its writing was interrupted: "
                "run `megatfm prep` (again)"
            )
        return cls.parse(read_range(path, 0, get_regular_file_size(path)), path)

    @classmethod
    def parse(cls, text: bytes, path: Path | str) -> Self:
        """Validate a manifest's text. Raises a MegatfmError that names the first wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            if first["loc"] == ("schema_version",) and type(first["input"]) is int and first["input"] > SCHEMA_VERSION:
                raise MegatfmError(
                    f"{path}: is of schema_version {first['input']}, and this megatfm reads {SCHEMA_VERSION}: update it"
                ) from error
            raise MegatfmError(f"{path}: {field}: {first['msg']}: {RESTORE}") from error


def _read_training_corpora(folder: Path) -> list[str] | None:
    """Return the training corpora of a run directory, as its config names them; None for another folder."""
    try:
        data = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8-sig"))["data"]
        sources = data.get("mixture", {}).values()
        return [path for path in [data.get("train"), *(source["path"] for source in sources)] if path]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
