"""Tars of samples as the webdataset library has them: `KEY.txt`, or `KEY.json` with a field that holds the text."""

import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    Bad,
    BadFileError,
    Record,
    opened,
    record_from_dict,
    selected_metadata,
    spelled,
)

_TEXTS = ("txt", "text")
_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MAX_EXTENSION_BYTES = 2**20
_MAX_MEMBERS = 10_000


class TarMember(NamedTuple):
    """A member of a sample: its name, its extension, and its data if it was asked for, or why it can't be used."""

    name: str
    extension: str
    data: bytes | None
    fault: str | None


def read_webdataset(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The samples of a tar, by their keys. Captions of images are read as any text; the images are left alone: the
    format for these is `images`."""
    for key, parts in samples(path, (*_TEXTS, "json")):
        record: Record | Bad = Bad(key, f"has no .txt and no .json with a field {config.text_key!r}")
        for part in parts:
            usable = _text_of(part, key, config)
            if usable is not None and not isinstance(record, Record):
                record = usable
        if isinstance(record, Record) and config.metadata_keys and not record.fields:
            record = replace(record, fields=_metadata_beside(parts, config))
        yield record


def samples(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, list[TarMember]]]:
    """Key and members of each sample: members that follow one another and have all before the first dot of their names
    in common. Raises BadFileError where the tar can't be read on."""
    last = "the first member"
    try:
        with opened(path) as file, tarfile.open(fileobj=_Ending(file), mode="r|", tarinfo=_Member) as tar:  # type: ignore[call-overload]
            files = (member for member in tar if not member.isdir())
            for key, members in groupby(files, key=lambda member: _split(member.name)[0]):
                last = key
                yield spelled(key), _parts(tar, members, wanted)
    except (
        tarfile.TarError,
        EOFError,
        ValueError,
        IndexError,
        OverflowError,
    ) as error:  # the library's, on forgeries
        raise BadFileError(f"is no whole tar, after {last!r} ({error})") from None


class _Ending:
    """A file that raises when it is read past its end: the library goes through a member's size block by block, and a
    header may claim 2⁶² bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._ended = file, False

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if not data and self._ended:
            raise tarfile.ReadError("a member's size leads past the end of the file")
        self._ended = not data
        return data


class _Member(tarfile.TarInfo):
    """A header that is refused where the library would be content: none at the end, or a name of any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        if not buf:
            raise tarfile.ReadError("the blocks that end it are missing")
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the blocks of zeros that end it
            raise
        except tarfile.HeaderError as error:  # in the middle, the library takes it for the end
            raise tarfile.ReadError(f"a damaged header: {error}") from None
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"a sparse file: {member.name!r}")
        if member.type in _EXTENSIONS and member.size > _MAX_EXTENSION_BYTES:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


def _parts(
    tar: tarfile.TarFile, members: Iterable[tarfile.TarInfo], wanted: Sequence[str]
) -> list[TarMember]:
    """The members of a sample, which together hold no more than a record may."""
    parts: list[TarMember] = []
    left = MAX_RECORD_BYTES
    for member in members:
        if len(parts) == _MAX_MEMBERS:
            raise tarfile.ReadError(f"a sample of over {_MAX_MEMBERS:,} members")
        parts.append(_part(tar, member, wanted, left))
        left -= len(parts[-1].data or b"")
    return parts


def _part(tar: tarfile.TarFile, member: tarfile.TarInfo, wanted: Sequence[str], most: int) -> TarMember:
    extension = _split(member.name)[1]
    if not member.isfile():
        return TarMember(member.name, extension, None, f"has a link or device: {member.name}")
    if extension not in wanted:
        return TarMember(member.name, extension, None, None)
    if member.size > most:
        what = "a member" if member.size > MAX_RECORD_BYTES else "members"
        fault = f"has {what} of over {MAX_RECORD_BYTES:,} bytes: {member.name}"
        return TarMember(member.name, extension, None, fault)
    file = tar.extractfile(member)
    return TarMember(member.name, extension, file.read() if file is not None else b"", None)


def _text_of(part: TarMember, key: str, config: ReadConfig) -> Record | Bad | None:
    """The text of a member, why it can't be used, or None if it holds something else."""
    if part.fault is not None:
        return Bad(key, part.fault)
    if part.data is None:
        return None
    try:
        text = part.data.decode("utf-8")
        if part.extension in _TEXTS:
            return Record(key, text)
        record = record_from_dict(key, json.loads(text), config)
    except UnicodeDecodeError as error:
        return Bad(key, f"has a member that is not valid UTF-8 at byte {error.start}: {part.name}")
    except (ValueError, RecursionError):
        return Bad(key, f"has a member that is not JSON: {part.name}")
    return record if isinstance(record, Record) else None


def _metadata_beside(parts: Sequence[TarMember], config: ReadConfig) -> dict[str, Any]:
    """The fields of the .json that lies beside a text."""
    for part in parts:
        if part.extension == "json" and part.data is not None:
            with suppress(ValueError, RecursionError):
                return selected_metadata(json.loads(part.data), config)
    return {}


def _split(name: str) -> tuple[str, str]:
    """`a/b.seg.txt` → (`a/b`, `seg.txt`)."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()
