"""Web pages: WARC files of crawlers, and dumps of MediaWiki (Wikipedia and others)."""

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import mwparserfromhell
import mwxml
from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    BadFileError,
    BadRecord,
    Record,
    open_decompressed,
    select_metadata,
)

_TYPES = ("text/", "application/xhtml", "application/xml")
_KINDS = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
_MAX_HEADER_LINES = 200


def read_warc(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Yield the pages of an archive, keyed by the number of their record from 1. The step `html` extracts their text.

    Bodies are unpacked (chunks, gzip, …), and text is decoded by the stated or else the detected encoding. Requests and
    metadata are skipped. Raises BadFileError at damage.
    """
    with open_decompressed(path) as file:
        number = 0
        for number, data in enumerate(_iter_frames(file), 1):
            try:
                record = _parse_record(data, "all")
                page = None if record is None else _extract_page(str(number), record, data, config)
            except Exception as error:  # the library raises several kinds, some of its own
                page = BadRecord(str(number), f"can't be understood: {str(error).partition(chr(10))[0]}")
            if page is not None:
                yield page
        if number == 0:
            raise BadFileError("holds no record")


def _parse_record(data: bytes, unpack: Literal["none", "all"]) -> WarcRecord | None:
    return next(ArchiveIterator(io.BytesIO(data), record_types=_KINDS, parse_http=True, auto_decode=unpack), None)


def _extract_page(key: str, record: WarcRecord, record_bytes: bytes, config: ReadConfig) -> Record | BadRecord:
    kind = (record.http_content_type or record.headers.get("Content-Type") or "").lower()
    if kind and not kind.startswith(_TYPES):
        return BadRecord(key, f"is no text but {kind.partition(';')[0]}")
    try:
        data = record.reader.read(MAX_RECORD_BYTES + 1)
    except OSError:
        # Crawlers may unpack a body and leave the header that says how it was packed.
        undecoded = _parse_record(record_bytes, "none")
        data = undecoded.reader.read() if undecoded else b""
        data.decode()
    if len(data) > MAX_RECORD_BYTES:
        return BadRecord(key, f"is longer than {MAX_RECORD_BYTES:,} bytes once unpacked")
    encoding = record.http_charset or detect_encoding(data) or "utf-8"
    header_names = {"url": "WARC-Target-URI", "date": "WARC-Date", "id": "WARC-Record-ID"}
    headers = {name: record.headers.get(header) for name, header in header_names.items()}
    return Record(key, bytes_to_str(data, encoding), headers["url"] or "", select_metadata(headers, config))


def _iter_frames(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of each record (ISO 28500, section 4).

    The library skips truncated records and those of a wrong length, so they are checked here.
    """
    number = 1
    while line := file.readline(2**16):
        if not line.strip():
            continue  # two empty lines end a record
        if not line.startswith(b"WARC/"):
            raise BadFileError(f"is no WARC file, or is damaged before record {number}")
        head, length = [line], -1
        while (line := file.readline(2**16)).strip():
            head.append(line)
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length" and re.fullmatch(rb"\s*\d{1,18}\s*", value):
                length = int(value)
            if len(head) > _MAX_HEADER_LINES:
                raise BadFileError(f"is damaged: record {number} has a header without an end")
        if not line.endswith(b"\n") or length < 0:
            raise BadFileError(f"is cut off or damaged in the header of record {number}")
        if length > MAX_RECORD_BYTES:
            raise BadFileError(f"record {number} is longer than {MAX_RECORD_BYTES:,} bytes")
        content = file.read(length)
        end = file.read(4)
        if len(content) < length or end not in (b"\r\n\r\n", b""):
            raise BadFileError(f"is cut off or damaged in record {number}")
        yield b"".join([*head, line, content, b"\r\n\r\n"])
        number += 1


_BLANK_LINES = re.compile(r"\n{3,}")
_NO_PROSE = ("file:", "image:", "category:")
_NO_PROSE_TAGS = ("ref", "table", "gallery", "math", "timeline")


def read_mediawiki(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Yield the articles (pages of namespace 0 that are no redirects), keyed by page id.

    A text is the title, a blank line, and the article without markup. Raises BadFileError at damage.
    """
    title = "the first page"
    try:
        with open_decompressed(path) as file:
            for page in mwxml.Dump.from_file(file):
                title = f"page {page.title!r}"
                if page.namespace != 0 or page.redirect:
                    continue
                text = None
                for revision in page:
                    text = revision.text
                if text is None:
                    yield BadRecord(str(page.id), "has no text")
                else:
                    metadata = select_metadata({"title": page.title, "id": page.id}, config)
                    yield Record(str(page.id), f"{page.title}\n\n{strip_wikitext(text)}", fields=metadata)
    except BadFileError:
        raise
    except Exception as error:  # the library raises several kinds, down to failed assertions
        raise BadFileError(f"is no whole MediaWiki dump, at {title} ({error})") from None


def strip_wikitext(wikitext: str) -> str:
    """Return wikitext without templates, tables, references, files and other markup."""
    code = mwparserfromhell.parse(wikitext)
    for link in code.filter_wikilinks(matches=lambda link: str(link.title).strip().lower().startswith(_NO_PROSE)):
        _remove(code, link)
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).strip().lower() in _NO_PROSE_TAGS):
        _remove(code, tag)
    return _BLANK_LINES.sub("\n\n", code.strip_code(normalize=True, collapse=True)).strip()


def _remove(code: mwparserfromhell.wikicode.Wikicode, node: mwparserfromhell.nodes.Node) -> None:
    with suppress(ValueError):  # its parent node was removed already
        code.remove(node)
