"""Readers: each format written by a library that no one here wrote; damage and hostile content are named."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.documents import Document
from megatfm.data_prep.input_files import DocumentReader, InputFiles
from megatfm.data_prep.readers import FORMATS, format_of, reader
from megatfm.data_prep.readers.record import Bad, BadFileError
from megatfm.data_prep.readers.web import plain
from megatfm.errors import MegatfmError
from tests.support.prep_files import warc_record

TEXTS = ["The first text.\n", "second: é 東京 \U0001f600\nwith lines\n\nand more", "x" * 3000, "fourth"]
URLS = [f"https://example.org/{number}" for number in range(len(TEXTS))]


def jsonl() -> bytes:
    rows = zip(TEXTS, URLS, strict=True)
    return "".join(json.dumps({"text": text, "url": url, "id": 1}) + "\n" for text, url in rows).encode()


def zstd_frames(data: bytes) -> bytes:
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


def table() -> pyarrow.Table:
    return pyarrow.table({"text": TEXTS, "url": URLS, "other": list(range(len(TEXTS)))})


def parquet() -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table(), sink, row_group_size=2)
    return sink.getvalue()


def arrow(kind: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    with kind(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=3)
    return sink.getvalue()


def table_of_cells(delimiter: str = ",") -> bytes:
    sink = io.StringIO(newline="")
    rows = csv.writer(sink, delimiter=delimiter)
    rows.writerows([("url", "text", "n"), *zip(URLS, TEXTS, range(4), strict=True)])
    return sink.getvalue().encode("utf-8-sig")


def tar(json_: bool = False) -> bytes:
    sink = io.BytesIO()
    with webdataset.TarWriter(sink) as writer:
        for number, text in enumerate(TEXTS):
            sample = {"json": {"text": text, "url": URLS[number]}} if json_ else {"txt": text}
            writer.write({"__key__": f"{number:04d}", "jpg": b"\xff\xd8not looked at", **sample})
    return sink.getvalue()


def warc() -> bytes:
    parts = []
    for text, url in zip(TEXTS, URLS, strict=True):
        body = text.encode("utf-16-le") if text == "fourth" else text.encode()
        charset = "utf-16-le" if text == "fourth" else "utf-8"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset={charset}\r\nContent-Length: {len(body)}\r\n\r\n"
        parts.append(warc_record("response", head.encode() + body, url, "application/http; msgtype=response"))
    return b"".join(parts)


def wiki() -> bytes:
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
    return (
        f"<page><title>{title}</title><ns>{space}</ns><id>{number}</id>{extra}<revision><id>{number}</id>"
        "<timestamp>2024-01-01T00:00:00Z</timestamp><contributor><username>u</username><id>1</id></contributor>"
        f'<model>wikitext</model><format>text/x-wiki</format><text xml:space="preserve">{text}</text>'
        "<sha1>x</sha1></revision></page>"
    )


FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": jsonl,
    "a.jsonl.gz": lambda: gzip.compress(jsonl()),
    "a.jsonl.bz2": lambda: bz2.compress(jsonl()),
    "a.jsonl.zst": lambda: zstd_frames(jsonl()),
    "a.jsonl.xz": lambda: lzma.compress(jsonl()),
    "a.json.gz": lambda: gzip.compress(jsonl()),
    "a.json": lambda: json.dumps([json.loads(line) for line in jsonl().splitlines()], indent=1).encode(),
    "a.csv": table_of_cells,
    "a.tsv.bz2": lambda: bz2.compress(table_of_cells("\t")),
    "a.parquet": parquet,
    "stream.arrow": lambda: arrow(pyarrow.ipc.new_stream),
    "file.arrow": lambda: arrow(pyarrow.ipc.new_file),
    "a.tar": tar,
    "json.tar.zst": lambda: zstd_frames(tar(json_=True)),
    "a.warc": warc,
    "a.warc.gz": lambda: b"".join(gzip.compress(record) for record in warc_records()),
    "a.xml": wiki,
    "a.xml.bz2": lambda: bz2.compress(wiki()),
}
WITHOUT_URL = ("a.tar", "a.xml", "a.xml.bz2")


def warc_records() -> list[bytes]:
    return [b"WARC/1.0" + item for item in warc().split(b"WARC/1.0")[1:]]


def documents(path: Path, limit: int = 2**20, **settings: Any) -> tuple[list[Document], DocumentReader]:
    read = DocumentReader(InputFiles(ReadConfig(folder=str(path.parent), **settings)), limit)
    return list(read.documents(lambda _: None)), read


@pytest.mark.parametrize("name", FILES)
def test_every_text_comes_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(FILES[name]())
    actual, read = documents(path)
    texts = (
        [f"Page {number}\n\n{text.strip()}" for number, text in enumerate(TEXTS)] if ".xml" in name else TEXTS
    )
    assert [document.text for document in actual] == texts
    assert [document.url for document in actual] == ([""] * 4 if name in WITHOUT_URL else URLS)
    assert len({document.id for document in actual}) == 4
    assert {document.file for document in actual} == {name}
    assert read.counts.documents_out == 4
    # What is too long is cut, without losing a byte.
    cut, _ = documents(path, limit=1024)
    assert "".join(document.text for document in cut) == "".join(texts)
    assert len(cut) > 4


def test_folders_of_datasets(tmp_path: Path) -> None:
    """As that library saves them, with its descriptions and caches, which are no text."""
    columns = {"text": [f"{number}: {text}" for number in range(5) for text in TEXTS], "url": URLS * 5}
    rows = datasets.Dataset.from_dict(columns)
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    (tmp_path / "one" / "cache-0123456789abcdef.arrow").write_bytes(arrow(pyarrow.ipc.new_stream))
    splits = {"train": rows, "test": rows.select(range(5))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    rows.to_parquet(tmp_path / "others" / "a.parquet")
    rows.to_json(tmp_path / "others" / "b.jsonl")
    (tmp_path / "others" / "state.json").write_text("the state of some text")
    actual, read = documents(tmp_path / "one")
    by_folder = {name: [item for item in actual if item.id.startswith(name)] for name in ("one", "splits/te")}
    assert [item.text for item in by_folder["one"]] == columns["text"]
    assert [item.url for item in by_folder["one"]] == columns["url"]
    assert [item.text for item in by_folder["splits/te"]] == columns["text"][:5]
    assert len(actual) == 4 * len(rows) + 5 + 1
    assert read._listing.n_excluded == 2 + 1 + 1 + 2 * 2


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("a.jsonl", "a.xml")])
@pytest.mark.parametrize("damage", ["cut", "cut late", "flip", "rubbish", "empty"])
def test_damage_is_named_and_what_came_before_it_can_be_used(tmp_path: Path, name: str, damage: str) -> None:
    data = bytearray(FILES[name]())
    if damage.startswith("cut"):
        # A tar may lack its last blocks of zeros, and archives end where they will; half of a record is missing here.
        del data[len(data) // 2 if damage == "cut" else len(data) * 7 // 8 :]
    elif damage == "flip":
        data[len(data) // 2] ^= 0x55
    else:
        data = bytearray(b"\x00rubbish " * 20 if damage == "rubbish" else b"")
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(data)
    selected, read = documents(path, on_error="skip")
    if bad := read._listing.bad:
        assert sum(dropped.documents for dropped in read.counts.dropped.values()) >= 1
        with pytest.raises(MegatfmError, match=r"read\.on_error=skip") as caught:
            documents(path)
        assert str(caught.value).startswith(f"{path}: {bad[0].reason}")
        assert "\n" not in str(caught.value)
    else:
        # Formats without checksums can't know of a changed byte; nothing else may pass, but an empty file.
        assert damage == "empty" or (damage == "flip" and len(selected) >= 3), (name, damage, len(selected))


def test_bad_records_are_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    lines = [
        '{"text": "good"}',
        "{",
        '{"text": 5}',
        '{"other": "x", "body": "y"}',
        '"text"',
        "",
        "[" * 10**5,
        '{"text": "\\ud83d!"}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(MegatfmError, match=r"a\.jsonl: record 2 is not JSON; mend it, or skip"):
        documents(path)
    actual, read = documents(path, on_error="skip")
    assert [(document.id, document.text) for document in actual] == [
        ("a.jsonl#1", "good"),
        ("a.jsonl#8", "\ufffd!"),
    ]
    assert {reason: dropped.documents for reason, dropped in read.counts.dropped.items()} == {
        "not_json": 2,
        "int_not_text_as_field_text": 1,
        "no_field_text": 2,
    }


def test_what_is_wrong_with_a_record_is_said(tmp_path: Path) -> None:
    """The fields that there are, and wrong UTF-8 by its name; records count from 1 in every format."""
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"body": "x"}\n{"body": "caf\xe9"}')
    there = (
        r"record 1 has no field 'text': its fields are body; name the one that holds the text: read\.text_key"
    )
    with pytest.raises(MegatfmError, match=rf"a\.jsonl: {there}; mend it"):
        documents(path)
    with pytest.raises(MegatfmError, match=r"a\.jsonl: record 2 is not valid UTF-8: byte 13 of its line"):
        documents(path, text_key="body")
    _, read = documents(path, on_error="skip")
    assert set(read.counts.dropped) == {"no_field_text", "not_valid_utf_8"}
    path.unlink()
    table = pyarrow.table({"body": ["x"], "n": [1]})
    pyarrow.parquet.write_table(table, path.with_name("a.parquet"))
    with pytest.raises(MegatfmError, match=there.replace("body;", "body, n;")):
        documents(path)
    assert [document.id for document in documents(path, text_key="body")[0]] == ["a.parquet#1"]


def test_fields_can_lie_inside_others(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"page": {"body": "inside", "at": "u"}}')
    actual, _ = documents(path, text_key="page.body", url_key="page.at")
    assert [(item.text, item.url) for item in actual] == [("inside", "u")]
    nested = pyarrow.table({"page": [{"body": "inside", "at": "u"}]})
    pyarrow.parquet.write_table(nested, path.with_name("b.parquet"))
    path.unlink()
    assert [document.text for document in documents(path, text_key="page.body")[0]] == ["inside"]


def test_text_under_compression_and_json_that_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\n" * 300))
    (tmp_path / "b.md.zst").write_bytes(zstd_frames(b"two"))
    (tmp_path / "c.json").write_text('{"name": "a package"}')
    (tmp_path / "d.json").write_text("[1, 2]")
    actual, _ = documents(tmp_path / "x")
    assert [(item.id, item.text) for item in actual] == [
        ("a.txt.gz", "one\n\n" * 300),
        ("b.md.zst", "two"),
        ("c.json", '{"name": "a package"}'),
        ("d.json", "[1, 2]"),
    ]
    parts, _ = documents(tmp_path / "x", limit=1024, include=["*.gz"])
    assert [part.record for part in parts] == ["a.txt.gz"] * 2
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\n" * 300)[:-9])
    with pytest.raises(MegatfmError, match=r"a\.txt\.gz: is damaged or cut off"):
        documents(tmp_path / "x")


def test_tables_of_cells_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for data, reason in (
        (b"text,n\na,1\nb\n", "record 2 has 1 cells, where the first row has 2"),
        (b"body,n\na,1\n", r"record 1 has no field 'text': its fields are body, n"),
        (b'text\n"a\n', r"is damaged after row 0 \(unexpected end of data\)"),
        (b"text\na\n\xff\n", "is not valid UTF-8: byte 0 of line 3"),
    ):
        path.write_bytes(data)
        with pytest.raises(MegatfmError, match=rf"a\.csv: {reason}"):
            documents(path)


def test_halves_of_surrogate_pairs_go_from_names_and_addresses(tmp_path: Path) -> None:
    """JSON can spell them, and tars have names that are no UTF-8."""
    (tmp_path / "a.jsonl").write_text('{"text": "one", "url": "http://x.org/\\ud800"}\n{"text": 1}')
    name = os.fsdecode(b"caf\xe9")
    with tarfile.open(tmp_path / "b.tar", "w", encoding="utf-8", errors="surrogateescape") as archive:
        for extension, data in (("txt", b"two"), ("json", b"{"), ("lnk", b"")):
            member = tarfile.TarInfo(f"{name}{len(extension) * 'x'}.{extension}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo(f"{name}.txt")
        link.type = tarfile.SYMTYPE
        archive.addfile(link)
    actual, read = documents(tmp_path / "x", on_error="skip")
    assert [item.text for item in actual] == ["one", "two"]
    output = [*actual[0].to_list(), *actual[1].to_list(), read.counts.as_json(), read._listing.bad]
    assert "\ufffd" in str(output)
    json.dumps(output, ensure_ascii=False, default=str).encode()


FOUND_BY_FUZZING = {
    "stream.arrow": (b"text", b"\xdcext"),  # a name of a column that is no UTF-8
    "file.arrow": (b"url", b"\xf5rl"),
    "b.xml": (b"<ns>0</ns>", b"<ns>x</ns>"),
    "c.xml": (b"2024-01-01T00:00:00Z", b"yesterday"),
}


@pytest.mark.parametrize("name", FOUND_BY_FUZZING)
def test_what_fuzzing_found(tmp_path: Path, name: str) -> None:
    good, bad = FOUND_BY_FUZZING[name]
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(FILES[name if name in FILES else "a.xml"]().replace(good, bad))
    with pytest.raises(MegatfmError, match="is no whole"):
        documents(path)


def test_tars_with_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        for name, kind in (
            ("../out.txt", tarfile.SYMTYPE),
            ("dev.txt", tarfile.CHRTYPE),
            ("dir", tarfile.DIRTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        for name, data in (("b.txt", b"good"), ("c.txt", b"\xff"), ("d.jpg", b"x"), ("e.json", b"{")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    actual = list(reader("webdataset")(path, ReadConfig(folder=str(path.parent))))
    assert [item.text for item in actual if not isinstance(item, Bad)] == ["good"]
    assert {item.key: item.reason for item in actual if isinstance(item, Bad)} == {
        "../out": "has a link or device: ../out.txt",
        "dev": "has a link or device: dev.txt",
        "c": "has a member that is not valid UTF-8 at byte 0: c.txt",
        "d": "has no .txt and no .json with a field 'text'",
        "e": "has a member that is not JSON: e.json",
    }


def test_tars_that_the_library_takes_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.tar"
    path.parent.mkdir()
    full = tar()
    path.write_bytes(full.rstrip(b"\0") + bytes(-len(full.rstrip(b"\0")) % 512))  # ends after a member
    with pytest.raises(MegatfmError, match="the blocks that end it are missing"):
        documents(path)
    bomb = tarfile.TarInfo("x" * 10)
    bomb.type, bomb.size = tarfile.XHDTYPE, 2**40
    path.write_bytes(bomb.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(MegatfmError, match="a header of 1,099,511,627,776 bytes"):
        documents(path)


def forged(name: str, size: int, kind: bytes = tarfile.REGTYPE, **fields: bytes) -> bytes:
    """A tar's header that says what it likes. fields: bytes at a place (`at_482`)."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for place, data in fields.items():
        start = int(place.removeprefix("at_"))
        header[start : start + len(data)] = data
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def extended(record: bytes, then: bytes) -> bytes:
    """A header of POSIX.1-2001 with one record, and what it is about."""
    return (
        forged("x", len(record), tarfile.XHDTYPE) + record.ljust(-(-len(record) // 512) * 512, b"\0") + then
    )


DATA = b"abc".ljust(512, b"\0")
FORGED = {
    "an image of 2⁶² bytes": (forged("a.jpg", 2**62) + DATA, "a member's size leads past the end of the file"),
    "a text": (forged("a.txt", 2**62) + DATA, "a member's size leads past the end of the file"),
    "of no known type": (forged("a.txt", 2**62, b"Z") + DATA, "a member's size leads past the end of the file"),
    "by its extension": (
        extended(b"28 size=4611686018427387904\n", forged("a.jpg", 3) + DATA),
        "a member's size leads past the end of the file",
    ),
    "a negative one": (forged("a.jpg", -(2**60)) + DATA, "seeking backwards"),
    "a sparse file": (forged("a.txt", 3, tarfile.GNUTYPE_SPARSE, at_482=b"\1"), "a sparse file: 'a.txt'"),
    "a length of 5,000 digits": (extended(b"9" * 5000 + b" size=3\n", forged("a.jpg", 3) + DATA), "no whole tar"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
@pytest.mark.parametrize("packed", [False, True])
def test_sizes_are_held_against_the_files(tmp_path: Path, case: str, packed: bool) -> None:
    """The library goes through a member of 2⁶² bytes block by block, for hours."""
    data, reason = FORGED[case]
    path = tmp_path / ("a.tar.gz" if packed else "a.tar")
    path.write_bytes(gzip.compress(data + bytes(1024)) if packed else data + bytes(1024))
    with pytest.raises(BadFileError, match=reason):
        list(reader("webdataset")(path, ReadConfig(folder=str(tmp_path))))


def test_a_record_of_a_length_of_5000_digits(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(
        warc().replace(b"Content-Length: ", b"Content-Length: " + b"9" * 5000, 1)
    )
    with pytest.raises(BadFileError, match="is cut off or damaged in the header of record 1"):
        list(reader("warc")(tmp_path / "a.warc", ReadConfig(folder=str(tmp_path))))


def test_endless_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.data_prep.readers.text.MAX_RECORD_BYTES", 10_000)
    for name, data in (("a.jsonl", b" " * 20_000), ("a.jsonl.gz", gzip.compress(b" " * 20_000))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadFileError, match="line 1 is longer than 10,000 bytes"):
            list(reader("jsonl")(tmp_path / name, ReadConfig(folder=str(tmp_path))))


def test_formats_by_name(tmp_path: Path) -> None:
    config = ReadConfig(folder=str(tmp_path))
    (tmp_path / "page.xml").write_text("<html/>")
    for name, format_ in {
        "A.JSONL": "jsonl",
        "x.py": "text",
        "page.xml": "text",
        "b.tgz": "webdataset",
    }.items():
        assert formatted(tmp_path / name, config) == format_
    assert formatted(tmp_path / "x.py", ReadConfig(folder=str(tmp_path), format="jsonl")) == "jsonl"
    (tmp_path / "array.json").write_text('\ufeff [\n {"text": "x"}]')
    assert formatted(tmp_path / "array.json", config) == "json", "by its beginning"
    by_name = {formatted(tmp_path / f"x{end}", config) for ends in FORMATS.values() for end in ends}
    assert by_name == set(FORMATS) - {"json"}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # warcio closes none of its buffers
def test_bodies_of_answers_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another library writes them: what HTTP allows, headers that a crawler left, and what can't be unpacked."""
    text = "Grüße from <b>a page</b> 東京\n" * 5
    data = text.encode()
    packed = gzip.compress(data)

    def chunked(body: bytes) -> bytes:
        return b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (7, body[:7], len(body) - 7, body[7:])

    gzip_, chunks = ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")
    good = [(data, []), (packed, [gzip_]), (chunked(data), [chunks]), (chunked(packed), [chunks, gzip_])]
    good += [(zlib.compress(data), [("Content-Encoding", "deflate")]), (data, [gzip_]), (data, [chunks])]
    bad = [(b"\xff\xfe rubbish", [gzip_]), (gzip.compress(bytes(20_000)), [gzip_])]
    for name in ("a.warc", "a.warc.gz"):
        with open(tmp_path / name, "wb") as file:
            writer = WARCWriter(file, gzip=name.endswith("gz"))
            writer.write_record(writer.create_warcinfo_record(name, {"software": "a crawler"}))
            for number, (body, headers) in enumerate(good + bad):
                http = StatusAndHeaders(
                    "200 OK", [("Content-Type", "text/html; charset=utf-8"), *headers], protocol="HTTP/1.1"
                )
                address = f"https://example.org/{number}"
                writer.write_record(
                    writer.create_warc_record(
                        address, "response", payload=io.BytesIO(body), http_headers=http
                    )
                )
            asked = StatusAndHeaders("GET / HTTP/1.1", [("Host", "example.org")], is_http_request=True)
            writer.write_record(
                writer.create_warc_record(
                    "https://example.org/", "request", payload=io.BytesIO(), http_headers=asked
                )
            )
        with monkeypatch.context() as patch:
            patch.setattr("megatfm.data_prep.readers.web.MAX_RECORD_BYTES", 10_000)
            actual = list(reader("warc")(tmp_path / name, ReadConfig(folder=str(tmp_path))))
        texts = [(item.url, item.text) for item in actual if not isinstance(item, Bad)]
        assert texts == [(f"https://example.org/{number}", text) for number in range(len(good))]
        rubbish, bomb = (item.reason for item in actual if isinstance(item, Bad))
        assert rubbish.startswith("can't be understood")
        assert bomb == "is longer than 10,000 bytes once unpacked"


def test_wikitext() -> None:
    text = (
        "'''Bold''' [[link|shown]] and [[plain]].<ref>{{cite|x}}</ref>\n[[File:a.jpg|thumb|A [[caption]]]]\n"
        "{{Infobox|name=x}}\n== Title ==\n{| class=x\n|a cell\n|}\n* item &amp; more\n[[Category:Cats]]"
    )
    got = plain(text)
    assert got.startswith("Bold shown and plain.")
    assert "Title" in got
    assert "item & more" in got
    for gone in ("cite", "thumb", "caption", "Infobox", "a cell", "Category", "[[", "{{", "'''"):
        assert gone not in got


@settings(max_examples=60)
@given(
    data=st.binary(max_size=400),
    name=st.sampled_from([name for name in FILES if name != "a.xml"]),
    at=st.integers(0, 10**6),
)
def test_no_bytes_bring_a_reader_down(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, at: int
) -> None:
    """Rubbish in the place of a part of a good file: records, or an error that is meant."""
    path = tmp_path_factory.mktemp("fuzz") / name
    file_bytes = FILES[name]()
    cut = at % (len(file_bytes) + 1)
    path.write_bytes(file_bytes[:cut] + data + file_bytes[cut + len(data) :])
    with contextlib.suppress(BadFileError):
        kind = "json" if name == "a.json" else formatted(path, ReadConfig(folder="x"))
        list(reader(kind)(path, ReadConfig(folder="x")))


def formatted(path: Path, config: ReadConfig) -> str:
    return format_of(str(path), config, lambda size: path.read_bytes()[:size])
