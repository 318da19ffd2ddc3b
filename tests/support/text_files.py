"""Files of every format that data_prep reads, with the same texts."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import webdataset
import zstandard

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.documents import Document
from megatfm.data_prep.input_files import DocumentReader, InputFiles
from megatfm.data_prep.readers import find_format
from tests.support.prep_files import warc_record

TEXTS = ["The first text.\n", "second: é 東京 \U0001f600\nwith lines\n\nand more", "x" * 3000, "fourth"]
URLS = [f"https://example.org/{number}" for number in range(len(TEXTS))]


def jsonl() -> bytes:
    """Lines of JSON with text and url."""
    rows = zip(TEXTS, URLS, strict=True)
    return "".join(json.dumps({"text": text, "url": url, "id": 1}) + "\n" for text, url in rows).encode()


def zstd_frames(data: bytes) -> bytes:
    """Data in two frames of Zstandard."""
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


def table() -> pyarrow.Table:
    """The texts as a table."""
    return pyarrow.table({"text": TEXTS, "url": URLS, "other": list(range(len(TEXTS)))})


def parquet() -> bytes:
    """A Parquet file of row groups of two."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table(), sink, row_group_size=2)
    return sink.getvalue()


def arrow(kind: Callable[..., Any]) -> bytes:
    """An Arrow file or stream."""
    sink = io.BytesIO()
    with kind(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=3)
    return sink.getvalue()


def table_of_cells(delimiter: str = ",") -> bytes:
    """A table of cells, as spreadsheets write it."""
    sink = io.StringIO(newline="")
    rows = csv.writer(sink, delimiter=delimiter)
    rows.writerows([("url", "text", "n"), *zip(URLS, TEXTS, range(4), strict=True)])
    return sink.getvalue().encode("utf-8-sig")


def tar(json_: bool = False) -> bytes:
    """A tar by the webdataset library."""
    sink = io.BytesIO()
    with webdataset.TarWriter(sink) as writer:
        for number, text in enumerate(TEXTS):
            sample = {"json": {"text": text, "url": URLS[number]}} if json_ else {"txt": text}
            writer.write({"__key__": f"{number:04d}", "jpg": b"\xff\xd8not looked at", **sample})
    return sink.getvalue()


def warc() -> bytes:
    """A WARC file, one of whose pages is in UTF-16."""
    parts = []
    for text, url in zip(TEXTS, URLS, strict=True):
        body = text.encode("utf-16-le") if text == "fourth" else text.encode()
        charset = "utf-16-le" if text == "fourth" else "utf-8"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset={charset}\r\nContent-Length: {len(body)}\r\n\r\n"
        parts.append(warc_record("response", head.encode() + body, url, "application/http; msgtype=response"))
    return b"".join(parts)


def wiki() -> bytes:
    """A dump of MediaWiki's pages."""
    pages = []
    for number, text in enumerate(TEXTS):
        pages.append(page(f"Page {number}", 0, number, text))
    pages += [
        page("Talk:x", 1, 90, "no article"),
        page("Old", 0, 91, "#REDIRECT [[Page 1]]", "<redirect title='Page 1'/>"),
    ]
    return (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en"><siteinfo>'
        "<sitename>W</sitename><dbname>w</dbname><base>b</base><generator>g</generator><case>first-letter</case>"
        f'<namespaces><namespace key="0" case="first-letter" /></namespaces></siteinfo>{"".join(pages)}</mediawiki>'
    ).encode()


def page(title: str, space: int, number: int, text: str, extra: str = "") -> str:
    """One page of a dump."""
    return (
        f"<page><title>{title}</title><ns>{space}</ns><id>{number}</id>{extra}<revision><id>{number}</id>"
        "<timestamp>2024-01-01T00:00:00Z</timestamp><contributor><username>u</username><id>1</id></contributor>"
        f'<model>wikitext</model><format>text/x-wiki</format><text xml:space="preserve">{text}</text>'
        "<sha1>x</sha1></revision></page>"
    )


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": jsonl, "a.jsonl.gz": lambda: gzip.compress(jsonl()), "a.jsonl.bz2": lambda: bz2.compress(jsonl()),
    "a.jsonl.zst": lambda: zstd_frames(jsonl()), "a.jsonl.xz": lambda: lzma.compress(jsonl()),
    "a.json.gz": lambda: gzip.compress(jsonl()),
    "a.json": lambda: json.dumps([json.loads(line) for line in jsonl().splitlines()], indent=1).encode(),
    "a.csv": table_of_cells, "a.tsv.bz2": lambda: bz2.compress(table_of_cells("\t")), "a.parquet": parquet,
    "stream.arrow": lambda: arrow(pyarrow.ipc.new_stream), "file.arrow": lambda: arrow(pyarrow.ipc.new_file),
    "a.tar": tar, "json.tar.zst": lambda: zstd_frames(tar(json_=True)), "a.warc": warc,
    "a.warc.gz": lambda: b"".join(gzip.compress(record) for record in warc_records()), "a.xml": wiki,
    "a.xml.bz2": lambda: bz2.compress(wiki()),
}  # fmt: skip
WITHOUT_URL = ("a.tar", "a.xml", "a.xml.bz2")


def warc_records() -> list[bytes]:
    """Single records of the WARC file."""
    return [b"WARC/1.0" + record for record in warc().split(b"WARC/1.0")[1:]]


def read_documents(path: Path, limit: int = 2**20, **settings: Any) -> tuple[list[Document], DocumentReader]:
    """All documents of a file, and what read them."""
    read = DocumentReader(InputFiles(ReadConfig(folder=str(path.parent), **settings)), limit)
    return list(read.iter_documents(lambda _: None)), read


def formatted(path: Path, config: ReadConfig) -> str:
    """Name of the format that a file is read as."""
    return find_format(str(path), config, lambda size: path.read_bytes()[:size])
