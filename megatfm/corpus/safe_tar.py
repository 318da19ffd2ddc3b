"""Tars of token ids that others wrote, read as a stream: nothing is extracted, and only plain files are let through."""

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.files import open_regular_file
from megatfm.corpus.manifest import TokenDtype
from megatfm.corpus.shard_format import npy_header
from megatfm.corpus.shard_index import MAX_FRAME_BYTES, NPY_HEADER_BYTES
from megatfm.errors import MegatfmError, RefusedMemberError, UsageError

ARRAY, TOKENS = ".npy", "tokens.npy"
"""End of an array's name; name after the key of the array of tokens, where there are several."""
PICKLES = (".pkl", ".pickle", ".pyd", ".pth", ".pt", ".joblib", ".dill")
STORED: dict[str, TokenDtype] = {"<u2": "uint16", "<u4": "uint32"}
MAX_EXTENSION_BYTES = 2**20
"""Limit of a long name or other extension of a header."""
_EXTENSIONS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class TokenArray(NamedTuple):
    """One sample's tokens in a shard."""

    key: str
    begin: int
    """Start of the sample's first member, in the uncompressed tar (or frame)."""
    payload: int
    """Start of its tokens."""
    tokens: NDArray[Any]
    has_native_layout: bool
    """Whether the array lies as our own do: 128 bytes of header, uint16 or uint32."""


def iter_shard_samples(path: Path) -> Iterator[TokenArray]:
    """The samples of a shard, as a stream: only the one at hand is in memory."""
    with open_regular_file(path) as file:
        if path.name.endswith(".tar"):
            yield from iter_tar_samples(file, path, require_end_marker=True)
            return
        try:
            # The window bounds zstd's memory; what a bomb would unpack to is read only as far as members reach.
            reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(
                file, read_across_frames=True
            )
            yield from iter_tar_samples(io.BufferedReader(reader, 2**20), path, require_end_marker=True)
        except zstandard.ZstdError as error:
            raise MegatfmError(f"{path}: damaged, or no zstd: {error}") from error


def iter_tar_samples(file: IO[bytes], path: Path, require_end_marker: bool) -> Iterator[TokenArray]:
    """The samples of an uncompressed tar. require_end_marker: whether its mark of the end must come."""
    sample: _Sample | None = None
    for member, data in tar_members(file, path, require_end_marker):
        directory, _, base = member.name.rpartition("/")
        key = f"{directory}/{base.partition('.')[0]}"
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample.tokens(path)
            sample = _Sample(key, member.offset)
        sample.add(member, data, path)
    if sample is not None:
        yield sample.tokens(path)


class _Sample:
    """The members of a sample, of which only the data of what may be its tokens is held."""

    def __init__(self, key: str, begin: int) -> None:
        self.key, self.begin = key, begin
        self._names = set[str]()
        self._arrays: list[str] = []
        self._chosen: tuple[tarfile.TarInfo, bytes] | None = None

    def add(self, member: tarfile.TarInfo, data: bytes, path: Path) -> None:
        if member.name in self._names:
            raise MegatfmError(f"{path}: {member.name!r} at byte {member.offset} is there twice")
        self._names.add(member.name)
        extension = member.name.rpartition("/")[2].partition(".")[2].lower()
        if not extension.endswith(ARRAY.lstrip(".")):
            return
        self._arrays.append(extension)
        if self._chosen is None or extension == TOKENS:
            self._chosen = member, data

    def tokens(self, path: Path) -> TokenArray:
        """Return the array of token ids. Raises a UsageError if there is none, or if any of several could be it."""
        location = f"{path}: sample {self.key.lstrip('/')!r} at byte {self.begin}"
        if self._chosen is None:
            raise UsageError(
                f"{location} has no {ARRAY} of token ids: text and images become a corpus by `megatfm prep`"
            )
        if len(self._arrays) > 1 and self._arrays.count(TOKENS) != 1:
            raise UsageError(
                f"{location} has several arrays ({', '.join(self._arrays)}): name the one of token ids KEY.{TOKENS}"
            )
        member, data = self._chosen
        tokens, in_place = _array(data, f"{path}: {member.name!r} at byte {member.offset}")
        return TokenArray(
            self.key.lstrip("/"), self.begin, member.offset_data + NPY_HEADER_BYTES, tokens, in_place
        )


def tar_members(
    file: IO[bytes], path: Path, require_end_marker: bool
) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Every member with its data, once it is known to be a plain file of a plain name and a possible size.

    require_end_marker: whether a tar's mark of its end must come, without which it is cut off.
    """
    ended = False

    class Header(tarfile.TarInfo):
        """A header that is no bomb, and the mark of the end noticed."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> Any:
            nonlocal ended
            ended = len(buf) == tarfile.BLOCKSIZE and not bytes(buf).strip(b"\0")
            return super().frombuf(buf, encoding, errors)

        def _proc_member(self, tar: Any) -> Any:
            # These would be read into memory as a whole.
            if self.type in _EXTENSIONS and self.size > MAX_EXTENSION_BYTES:
                raise tarfile.ReadError(f"a header of {self.size} bytes at byte {tar.offset}")
            return super()._proc_member(tar)  # type: ignore[misc]

    try:
        with tarfile.open(fileobj=file, mode="r|", bufsize=2**18, tarinfo=Header) as tar:
            for member in tar:
                location = f"{path}: {member.name!r} at byte {member.offset}"
                if member.isdir():
                    continue
                _check_member(member, location)
                source = tar.extractfile(member)
                assert source is not None
                data = source.read()
                if len(data) != member.size:
                    raise MegatfmError(f"{location}: is cut off")
                yield member, data
    except zstandard.ZstdError as error:
        raise MegatfmError(f"{path}: damaged, or no zstd: {error}") from error
    except (tarfile.TarError, EOFError, OSError, ValueError, IndexError, OverflowError) as error:
        raise MegatfmError(f"{path}: not a whole tar ({error})") from error
    if require_end_marker and not ended:
        raise MegatfmError(f"{path}: is cut off: no mark of a tar's end")


def _check_member(member: tarfile.TarInfo, location: str) -> None:
    if not member.isreg() or member.issparse():
        raise RefusedMemberError(f"{location}: is a link, a device or another special file: refused")
    if member.name.startswith("/") or ".." in member.name.split("/") or "\\" in member.name:
        raise RefusedMemberError(f"{location}: its name leads out of the folder: refused")
    if member.name.lower().endswith(PICKLES):
        raise RefusedMemberError(f"{location}: is a pickle, which could run anything: refused")
    if not 0 <= member.size <= MAX_FRAME_BYTES:
        raise RefusedMemberError(f"{location}: claims {member.size} bytes, over {MAX_FRAME_BYTES}: refused")


_NPY_HEADER = re.compile(
    rb"""\{'descr': '([<>|][a-zA-Z]\d{1,2})', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),?\),? ?\}\s*"""
)

_INTEGERS = [f"{sign}{size}".encode() for sign in "iu" for size in (1, 2, 4, 8)]


def _array(data: bytes, location: str) -> tuple[NDArray[Any], bool]:
    """The tokens of an .npy member, and whether they lie as in shards of our own.

    The header is read here: NumPy's reader evaluates it as Python, and fails in many ways on damaged ones.
    """
    wide = data[6:7] in (b"\x02", b"\x03")
    start = 12 if wide else 10
    end = start + int.from_bytes(data[8:start], "little")
    header = _NPY_HEADER.fullmatch(data[start:end])
    if data[:6] != b"\x93NUMPY" or header is None or header[1][1:] not in _INTEGERS:
        header_text = data[start : min(end, start + 80)].decode("ascii", "replace").strip()
        raise MegatfmError(f"{location}: no array of token ids, which are integers [n]: {header_text!r}")
    dtype, n = np.dtype(header[1].decode()), int(header[2])
    if n * dtype.itemsize != len(data) - end:
        raise MegatfmError(f"{location}: no array of token ids: its size is not what its header says")
    is_canonical = dtype.str in STORED and data[:NPY_HEADER_BYTES] == npy_header(dtype, n)
    return np.frombuffer(data, dtype, n, end), is_canonical
