"""Read untrusted tars of token ids as a stream: nothing is extracted, and only plain files are accepted."""

import io
import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.files import open_regular_file
from megatfm.corpus.manifest import TokenDtype
from megatfm.corpus.shard_format import make_npy_header
from megatfm.corpus.shard_index import MAX_FRAME_BYTES, NPY_HEADER_BYTES
from megatfm.errors import MegatfmError, RefusedMemberError, UsageError

ARRAY_SUFFIX, TOKENS_NAME = ".npy", "tokens.npy"
"""Suffix of an array's name, and the name after the key that chooses the array of tokens among several."""
PICKLE_SUFFIXES = (".pkl", ".pickle", ".pyd", ".pth", ".pt", ".joblib", ".dill")
STORED_DTYPES: dict[str, TokenDtype] = {"<u2": "uint16", "<u4": "uint32"}
MAX_EXTENSION_BYTES = 2**20
"""Limit of a header extension, such as a long name."""
_EXTENSIONS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


TarData = tuple[tarfile.TarInfo, bytes]
"""A member of a tar, and its data."""


class SafeTarInfo(tarfile.TarInfo):
    """A header that refuses sparse files, and extensions over MAX_EXTENSION_BYTES, which are read as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header. Raises tarfile.TarError."""
        member = super().frombuf(buf, encoding, errors)
        if member.type == tarfile.GNUTYPE_SPARSE:
            member._refuse_sparse(member)
        if member.type in _EXTENSIONS and member.size > MAX_EXTENSION_BYTES:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member

    def _refuse_sparse(self, member: tarfile.TarInfo, *more: Any) -> None:
        headers: dict[str, str] = next((part for part in more if isinstance(part, dict)), {})
        name = headers.get("GNU.sparse.name", member.name)
        raise tarfile.ReadError(f"a sparse file: {name!r}: write the tar again without --sparse")

    # tarfile calls these for the sparse files of POSIX tars, by the version of their map.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class TokenArray(NamedTuple):
    """One sample's tokens in a shard."""

    key: str
    begin: int
    """Start of the sample's first member, in the uncompressed tar (or frame)."""
    payload: int
    """Start of its tokens."""
    tokens: NDArray[Any]
    has_native_layout: bool
    """True if the array is stored as in our own shards: 128 bytes of header, then uint16 or uint32."""


def iter_shard_samples(path: Path) -> Iterator[TokenArray]:
    """Yield the samples of a shard, one at a time, so that only one is in memory."""
    with open_regular_file(path) as file:
        if path.name.endswith(".tar"):
            yield from iter_tar_samples(file, path, require_end_marker=True)
            return
        try:
            # The window limits zstd's memory. A decompression bomb is read only as far as the tar's members reach.
            reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file, read_across_frames=True)
            yield from iter_tar_samples(io.BufferedReader(reader, 2**20), path, require_end_marker=True)
        except zstandard.ZstdError as error:
            raise MegatfmError(f"{path}: damaged, or no zstd: {error}") from error


def iter_tar_samples(file: IO[bytes], path: Path, require_end_marker: bool) -> Iterator[TokenArray]:
    """Yield the samples of an uncompressed tar. require_end_marker: raise a MegatfmError if the tar is cut off."""
    for key, members in group_by_key(iter_tar_members(file, path, require_end_marker)):
        yield _find_tokens(key, members, path)


def group_by_key(members: Iterable[TarData]) -> Iterator[tuple[str, Iterator[TarData]]]:
    """Yield key and members of each sample, consecutive members whose names agree up to the first dot."""
    return groupby(members, key=lambda member: split_member_name(member[0].name)[0])


def split_member_name(name: str) -> tuple[str, str]:
    """Split a name into the key of its sample and its extension: `a/b.seg.TXT` → (`a/b`, `seg.txt`)."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _find_tokens(key: str, members: Iterator[TarData], path: Path) -> TokenArray:
    """Return a sample's array of token ids. Raises a UsageError if there is none, or several without `TOKENS_NAME`."""
    names, extensions, begin = set[str](), list[str](), -1
    for member, data in members:
        begin = member.offset if begin < 0 else begin
        if member.name in names:
            raise MegatfmError(f"{path}: {member.name!r} at byte {member.offset} is there twice")
        names.add(member.name)
        extension = split_member_name(member.name)[1]
        if f".{extension}".endswith(ARRAY_SUFFIX):
            extensions.append(extension)
            if len(extensions) == 1 or extension == TOKENS_NAME:
                tokens_member, tokens_data = member, data
    location = f"{path}: sample {key!r} at byte {begin}"
    if not extensions:
        raise UsageError(
            f"{location} has no {ARRAY_SUFFIX} of token ids: text and images become a corpus by `megatfm prep`"
        )
    if len(extensions) > 1 and extensions.count(TOKENS_NAME) != 1:
        raise UsageError(
            f"{location} has several arrays ({', '.join(extensions)}): name the one of token ids KEY.{TOKENS_NAME}"
        )
    tokens, has_native_layout = _parse_array(
        tokens_data, f"{path}: {tokens_member.name!r} at byte {tokens_member.offset}"
    )
    return TokenArray(key, begin, tokens_member.offset_data + NPY_HEADER_BYTES, tokens, has_native_layout)


def iter_tar_members(
    file: IO[bytes], path: Path, require_end_marker: bool, *, allow_more: bool = False
) -> Iterator[TarData]:
    """Yield every plain file of a tar with its data; skip folders.

    Raises a RefusedMemberError for other kinds of members, unsafe names and absurd sizes, and a MegatfmError for a
    damaged tar. require_end_marker: also raise it if the tar lacks its end marker, so that it is cut off.
    allow_more: accept data behind that marker.
    """
    has_end_marker = False

    class Header(SafeTarInfo):
        """A header that notes whether the last one read was the end marker."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> Any:
            nonlocal has_end_marker
            has_end_marker = len(buf) == tarfile.BLOCKSIZE and not bytes(buf).strip(b"\0")
            return super().frombuf(buf, encoding, errors)

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
            if not allow_more:
                check_nothing_follows(tar)
    except zstandard.ZstdError as error:
        raise MegatfmError(f"{path}: damaged, or no zstd: {error}") from error
    except (tarfile.TarError, EOFError, OSError, ValueError, IndexError, OverflowError) as error:
        raise MegatfmError(f"{path}: not a whole tar ({error})") from error
    if require_end_marker and not has_end_marker:
        raise MegatfmError(f"{path}: is cut off: no mark of a tar's end")


def check_nothing_follows(tar: tarfile.TarFile) -> None:
    """Raise a tarfile.ReadError if anything but zeros follows the end of a tar that was read as a stream.

    Most often it is another tar (`cat a.tar b.tar`), whose samples would be missing.
    """
    stream: Any = tar.fileobj
    while rest := stream.read(2**18):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(
                f"data follows its end, before byte {stream.tell()}: if tars were joined by `cat`, write each to a file"
            )


def _check_member(member: tarfile.TarInfo, location: str) -> None:
    if not member.isreg():
        raise RefusedMemberError(f"{location}: is a link, a device or another special file: refused")
    if member.name.startswith("/") or ".." in member.name.split("/") or "\\" in member.name:
        raise RefusedMemberError(f"{location}: its name leads out of the folder: refused")
    if member.name.lower().endswith(PICKLE_SUFFIXES):
        raise RefusedMemberError(f"{location}: is a pickle, which could run anything: refused")
    if not 0 <= member.size <= MAX_FRAME_BYTES:
        raise RefusedMemberError(f"{location}: claims {member.size} bytes, over {MAX_FRAME_BYTES}: refused")


_NPY_HEADER = re.compile(
    rb"""\{'descr': '([<>|][a-zA-Z]\d{1,2})', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),?\),? ?\}\s*"""
)

_INTEGERS = [f"{sign}{size}".encode() for sign in "iu" for size in (1, 2, 4, 8)]


def _parse_array(data: bytes, location: str) -> tuple[NDArray[Any], bool]:
    """Return the tokens [n] of an .npy member, and True if they are stored as in our own shards.

    NumPy's reader is not used: it evaluates the header as Python, and fails in many ways on damaged ones.
    """
    has_long_header = data[6:7] in (b"\x02", b"\x03")
    start = 12 if has_long_header else 10
    end = start + int.from_bytes(data[8:start], "little")
    header = _NPY_HEADER.fullmatch(data[start:end])
    if data[:6] != b"\x93NUMPY" or header is None or header[1][1:] not in _INTEGERS:
        header_text = data[start : min(end, start + 80)].decode("ascii", "replace").strip()
        raise MegatfmError(f"{location}: no array of token ids, which are integers [n]: {header_text!r}")
    dtype, n = np.dtype(header[1].decode()), int(header[2])
    if n * dtype.itemsize != len(data) - end:
        raise MegatfmError(f"{location}: no array of token ids: its size is not what its header says")
    has_native_layout = dtype.str in STORED_DTYPES and data[:NPY_HEADER_BYTES] == make_npy_header(dtype, n)
    return np.frombuffer(data, dtype, n, end), has_native_layout
