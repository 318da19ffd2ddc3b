"""Tars of samples as the webdataset library has them: `KEY.txt`, or `KEY.json` with a field that holds the text."""

import json
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from data_prep.readers.record import MAX_RECORD_BYTES, Bad, BadFileError, Record, from_fields, opened
from megatfm.config.prep import ReadConfig

_TEXTS = ("txt", "text")
_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MAX_EXTENSION_BYTES = 2**20


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The samples of a tar, by their keys: members that follow one another and have all before the first dot of
    their names in common. Captions of images are read as any text; the images are left alone."""
    last = "the first member"
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
            for key, members in groupby(tar, key=lambda member: _split(member.name)[0]):
                last = key
                found: Record | Bad = Bad(
                    key, f"has no .txt and no .json with a field {config.fields.text!r}"
                )
                for member in members:
                    if member.isdir():
                        break
                    usable = _use(tar, member, key, config)
                    if usable is not None and not isinstance(found, Record):
                        found = usable
                else:
                    yield found
    except (tarfile.TarError, EOFError) as error:
        raise BadFileError(f"is no whole tar, after {last!r} ({error})") from None


class _Member(tarfile.TarInfo):
    """A header that is refused where the library would be content: none at the end, or a name of any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        if not buf:
            raise tarfile.ReadError("the blocks that end it are missing")
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENSIONS and member.size > _MAX_EXTENSION_BYTES:
            raise tarfile.ReadError(f"a header of {member.size:,} bytes")
        return member


def _use(tar: tarfile.TarFile, member: tarfile.TarInfo, key: str, config: ReadConfig) -> Record | Bad | None:
    """The text of a member, why it can't be used, or None if it holds something else."""
    if not member.isfile():
        return Bad(key, f"has a link or device: {member.name}")
    extension = _split(member.name)[1]
    if extension not in (*_TEXTS, "json"):
        return None
    if member.size > MAX_RECORD_BYTES:
        return Bad(key, f"has a member of over {MAX_RECORD_BYTES:,} bytes: {member.name}")
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    try:
        text = data.decode("utf-8")
        if extension in _TEXTS:
            return Record(key, text)
        found = from_fields(key, json.loads(text), config.fields.text, config.fields.url)
    except UnicodeDecodeError as error:
        return Bad(key, f"has a member that is not valid UTF-8 at byte {error.start}: {member.name}")
    except (ValueError, RecursionError):
        return Bad(key, f"has a member that is not JSON: {member.name}")
    return found if isinstance(found, Record) else None


def _split(name: str) -> tuple[str, str]:
    """`a/b.seg.txt` → (`a/b`, `seg.txt`)."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()
