"""Tars of samples in the format of the webdataset library: `KEY.txt`, or `KEY.json` with a field of text."""

import tarfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

from megatfm.config.prep import ReadConfig
from megatfm.corpus.safe_tar import SafeTarInfo, check_nothing_follows, split_member_name
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    BadFileError,
    BadRecord,
    Record,
    find_repeated_key,
    open_decompressed,
    parse_json,
    record_from_dict,
    replace_surrogates,
    select_metadata,
)

_TEXTS = ("txt", "text")
_MAX_MEMBERS = 10_000


class TarMember(NamedTuple):
    """A member of a sample: its name, its extension, and its data if requested, or the reason why it is unusable."""

    name: str
    extension: str
    data: bytes | None
    fault: str | None


def read_webdataset(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Yield the texts of a tar's samples. Captions of images are read like any text; images themselves need the format
    `images`."""
    for key, members in read_samples(path, (*_TEXTS, "json")):
        record: Record | BadRecord = BadRecord(key, f"has no .txt and no .json with a field {config.text_key!r}")
        for member in members:
            candidate = _read_text(member, key, config)
            if candidate is not None and not isinstance(record, Record):
                record = candidate
        if isinstance(record, Record) and config.metadata_keys and not record.fields:
            record = _add_metadata(record, members, config)
        extensions = [member.extension for member in members if member.data is not None]
        if isinstance(record, Record) and all(extension in extensions for extension in _TEXTS):
            record = BadRecord(key, "has a .txt and a .text: one of them is its text")
        if isinstance(record, Record) and (repeated := find_repeated_extension(members)):
            record = BadRecord(key, f"has a .{repeated} twice")
        yield record


def read_samples(path: Path, extensions: Container[str]) -> Iterator[tuple[str, list[TarMember]]]:
    """Yield key and members of each sample: consecutive members whose names agree up to the first dot.

    extensions: of the members to read. Raises BadFileError at damage.
    """
    last_key = "the first member"
    try:
        with (
            open_decompressed(path) as file,
            tarfile.open(fileobj=cast(Any, bounded := _BoundedFile(file)), mode="r|", tarinfo=_StrictTarInfo) as tar,
        ):
            files = (member for member in tar if not member.isdir())
            for key, members in groupby(files, key=lambda member: split_member_name(member.name)[0]):
                last_key = key
                yield replace_surrogates(key), _read_members(tar, members, extensions)
            bounded.is_over = True
            check_nothing_follows(tar)
    # tarfile raises all of these on forged tars.
    except (tarfile.TarError, EOFError, ValueError, IndexError, OverflowError) as error:
        raise BadFileError(f"is no whole tar, after {last_key!r} ({error})") from None


def find_repeated_extension(members: Sequence[TarMember]) -> str | None:
    """Return the first extension that two members of a sample that are read share; None if there is none."""
    extensions = [member.extension for member in members if member.data is not None]
    return next((extension for extension in extensions if extensions.count(extension) > 1), None)


class _BoundedFile:
    """A file that raises when it is read past its end. tarfile skips a member block by block, and a header may claim
    2⁶² bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._is_at_end = file, False
        self.is_over = False
        """Whether all members were read, so that the end of the file is no surprise."""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if not data and self._is_at_end and not self.is_over:
            raise tarfile.ReadError("a member's size leads past the end of the file")
        self._is_at_end = not data
        return data


class _StrictTarInfo(SafeTarInfo):
    """A header that refuses damage that tarfile accepts, such as a missing end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if not buf:
            raise tarfile.ReadError("the blocks that end it are missing")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the blocks of zeros that end it
            raise
        except tarfile.HeaderError as error:  # tarfile would take it for the end
            raise tarfile.ReadError(f"a damaged header: {error}") from None


def _read_members(
    tar: tarfile.TarFile, members: Iterable[tarfile.TarInfo], extensions: Container[str]
) -> list[TarMember]:
    """Read the members of a sample, together at most MAX_RECORD_BYTES."""
    tar_members: list[TarMember] = []
    bytes_left = MAX_RECORD_BYTES
    for member in members:
        if len(tar_members) == _MAX_MEMBERS:
            raise tarfile.ReadError(f"a sample of over {_MAX_MEMBERS:,} members")
        tar_members.append(_read_member(tar, member, extensions, bytes_left))
        bytes_left -= len(tar_members[-1].data or b"")
    return tar_members


def _read_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, extensions: Container[str], max_bytes: int
) -> TarMember:
    extension = split_member_name(member.name)[1]
    if not member.isfile():
        return TarMember(member.name, extension, None, f"has a link or device: {member.name}")
    if extension not in extensions:
        return TarMember(member.name, extension, None, None)
    if member.size > max_bytes:
        subject = "a member" if member.size > MAX_RECORD_BYTES else "members"
        fault = f"has {subject} of over {MAX_RECORD_BYTES:,} bytes: {member.name}"
        return TarMember(member.name, extension, None, fault)
    file = tar.extractfile(member)
    return TarMember(member.name, extension, file.read() if file is not None else b"", None)


def _read_text(member: TarMember, key: str, config: ReadConfig) -> Record | BadRecord | None:
    """Return the record of a member, the reason why it is unusable, or None if it has no text."""
    if member.fault is not None:
        return BadRecord(key, member.fault)
    if member.data is None:
        return None
    try:
        text = member.data.decode("utf-8-sig")
        if member.extension in _TEXTS:
            return Record(key, text)
        content = parse_json(text)
    except UnicodeDecodeError as error:
        return BadRecord(key, f"has a member that is not valid UTF-8: {member.name}, at byte {error.start}")
    except (ValueError, RecursionError):
        return BadRecord(key, f"has a member that is not JSON: {member.name}")
    if repeated := find_repeated_key(content, (config.text_key, config.url_key, *config.metadata_keys)):
        return BadRecord(key, f"has a key twice: {repeated!r}")
    record = record_from_dict(key, content, config)
    return record if isinstance(record, Record) else None


def _add_metadata(record: Record, members: Sequence[TarMember], config: ReadConfig) -> Record | BadRecord:
    """Return a text's record with the fields of the .json beside it, or the reason why that is unusable."""
    for member in members:
        if member.extension == "json" and member.data is not None:
            try:
                metadata = parse_json(member.data)
            except (ValueError, RecursionError):
                return BadRecord(record.key, f"has a member that is not JSON: {member.name}")
            if repeated := find_repeated_key(metadata, config.metadata_keys):
                return BadRecord(record.key, f"has a key twice: {repeated!r}")
            return replace(record, fields=select_metadata(metadata, config))
    return record
