"""Readers: each format written by a library that no one here wrote; damage and hostile content are named."""

import gzip
import io
import json
import os
import tarfile
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers import FORMATS, get_reader
from megatfm.data_prep.readers.record import BadRecord
from megatfm.data_prep.readers.web import strip_wikitext
from megatfm.errors import MegatfmError
from tests.support.prep_files import write_file
from tests.support.text_files import FILES, TEXTS, URLS, WITHOUT_URL, arrow, formatted, read_documents, zstd_frames
from tests.support.webdatasets import make_member, make_tar, pack_tar


@pytest.mark.parametrize("name", FILES)
def test_every_text_comes_out(tmp_path: Path, name: str) -> None:
    path = write_file(tmp_path / "in" / name, FILES[name]())
    result, read = read_documents(path)
    texts = [f"Page {number}\n\n{text.strip()}" for number, text in enumerate(TEXTS)] if ".xml" in name else TEXTS
    assert [document.text for document in result] == texts
    assert [document.url for document in result] == ([""] * 4 if name in WITHOUT_URL else URLS)
    assert len({document.id for document in result}) == 4
    assert {document.file for document in result} == {name}
    assert read.counts.documents_out == 4
    # What is too long is cut, without losing a byte.
    cut, _ = read_documents(path, limit=1024)
    assert "".join(document.text for document in cut) == "".join(texts)
    assert len(cut) > 4


def test_folders_of_datasets(tmp_path: Path) -> None:
    """Folders are as that library saves them; its descriptions and caches are not read as text."""
    import datasets

    columns = {"text": [f"{number}: {text}" for number in range(5) for text in TEXTS], "url": URLS * 5}
    rows = datasets.Dataset.from_dict(columns)
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    (tmp_path / "one" / "cache-0123456789abcdef.arrow").write_bytes(arrow(pyarrow.ipc.new_stream))
    splits = {"train": rows, "test": rows.select(range(5))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    rows.to_parquet(tmp_path / "others" / "a.parquet")
    rows.to_json(tmp_path / "others" / "b.jsonl")
    (tmp_path / "others" / "state.json").write_text("the state of some text")
    result, read = read_documents(tmp_path / "one")
    by_folder = {name: [one for one in result if one.id.startswith(name)] for name in ("one", "splits/te")}
    assert [one.text for one in by_folder["one"]] == columns["text"]
    assert [one.url for one in by_folder["one"]] == columns["url"]
    assert [one.text for one in by_folder["splits/te"]] == columns["text"][:5]
    assert len(result) == 4 * len(rows) + 5 + 1
    assert read._inputs.n_excluded == 2 + 1 + 1 + 2 * 2


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
    path = write_file(tmp_path / "in" / name, data)
    documents, read = read_documents(path, on_error="skip")
    if bad := read._inputs.bad:
        assert sum(dropped.documents for dropped in read.counts.dropped.values()) >= 1
        with pytest.raises(MegatfmError, match=r"read\.on_error=skip") as caught:
            read_documents(path)
        assert str(caught.value).startswith(f"{path}: {bad[0].reason}")
        assert "\n" not in str(caught.value)
    else:
        # Formats without checksums can't know of a changed byte; nothing else may pass, but an empty file.
        assert damage == "empty" or (damage == "flip" and len(documents) >= 3), (name, damage, len(documents))


def test_bad_records_are_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    lines = [
        '{"text": "good"}', "{", '{"text": 5}', '{"other": "x", "body": "y"}', '"text"', "", "[" * 10**5,
        '{"text": "\\ud83d!"}',
    ]  # fmt: skip
    path = write_file(tmp_path / "in" / "a.jsonl", "\n".join(lines).encode())
    with pytest.raises(MegatfmError, match=r"a\.jsonl: record 2 is not JSON; mend it, or skip"):
        read_documents(path)
    result, read = read_documents(path, on_error="skip")
    assert [(document.id, document.text) for document in result] == [("a.jsonl#1", "good"), ("a.jsonl#8", "\ufffd!")]
    assert {reason: dropped.documents for reason, dropped in read.counts.dropped.items()} == {
        "not_json": 2,
        "int_not_text_as_field_text": 1,
        "no_field_text": 2,
    }


def test_a_bad_record_is_named_with_its_fault(tmp_path: Path) -> None:
    """The fields that there are, and wrong UTF-8 by its name; records count from 1 in every format."""
    path = write_file(tmp_path / "in" / "a.jsonl", b'{"body": "x"}\n{"body": "caf\xe9"}')
    reason = r"record 1 has no field 'text': its fields are body; name the one that holds the text: read\.text_key"
    with pytest.raises(MegatfmError, match=rf"a\.jsonl: {reason}; mend it"):
        read_documents(path)
    with pytest.raises(MegatfmError, match=r"a\.jsonl: record 2 is not valid UTF-8: byte 13 of its line"):
        read_documents(path, text_key="body")
    _, read = read_documents(path, on_error="skip")
    assert set(read.counts.dropped) == {"no_field_text", "not_valid_utf_8"}
    path.unlink()
    table = pyarrow.table({"body": ["x"], "n": [1]})
    pyarrow.parquet.write_table(table, path.with_name("a.parquet"))
    with pytest.raises(MegatfmError, match=reason.replace("body;", "body, n;")):
        read_documents(path)
    assert [one.id for one in read_documents(path, text_key="body")[0]] == ["a.parquet#1"]


def test_fields_can_lie_inside_others(tmp_path: Path) -> None:
    path = write_file(tmp_path / "in" / "a.jsonl", b'{"page": {"body": "inside", "at": "u"}}')
    result, _ = read_documents(path, text_key="page.body", url_key="page.at")
    assert [(one.text, one.url) for one in result] == [("inside", "u")]
    nested = pyarrow.table({"page": [{"body": "inside", "at": "u"}]})
    pyarrow.parquet.write_table(nested, path.with_name("b.parquet"))
    path.unlink()
    assert [one.text for one in read_documents(path, text_key="page.body")[0]] == ["inside"]


def test_text_under_compression_and_json_that_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\n" * 300))
    (tmp_path / "b.md.zst").write_bytes(zstd_frames(b"two"))
    (tmp_path / "c.json").write_text('{"name": "a package"}')
    (tmp_path / "d.json").write_text("[1, 2]")
    result, _ = read_documents(tmp_path / "x")
    assert [(one.id, one.text) for one in result] == [
        ("a.txt.gz", "one\n\n" * 300),
        ("b.md.zst", "two"),
        ("c.json", '{"name": "a package"}'),
        ("d.json", "[1, 2]"),
    ]
    parts, _ = read_documents(tmp_path / "x", limit=1024, include=["*.gz"])
    assert [one.record for one in parts] == ["a.txt.gz"] * 2
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\n" * 300)[:-9])
    with pytest.raises(MegatfmError, match=r"a\.txt\.gz: is damaged or cut off"):
        read_documents(tmp_path / "x")


def test_tables_of_cells_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for data, reason in (
        (b"text,n\na,1\nb\n", "record 2 has another number of cells than the first row: 1, not 2"),
        (b"body,n\na,1\n", r"record 1 has no field 'text': its fields are body, n"),
        (b'text\n"a\n', r"is damaged after row 0 \(unexpected end of data\)"),
        (b"text\na\n\xff\n", "is not valid UTF-8: byte 0 of line 3"),
    ):
        path.write_bytes(data)
        with pytest.raises(MegatfmError, match=rf"a\.csv: {reason}"):
            read_documents(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Records would have the last one alone. Columns that nobody asks for may repeat."""
    (tmp_path / "in").mkdir()
    table = pyarrow.Table.from_arrays([["one"], ["two"], [1], [2]], names=["text", "text", "n", "n"])
    pyarrow.parquet.write_table(table, tmp_path / "in" / "a.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "in" / "b.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "in" / "c.csv").write_text("text,text,n,n\none,two,1,2\n")
    for name in ("a.parquet", "b.arrow", "c.csv"):
        with pytest.raises(MegatfmError, match=f"{name}: has the column 'text' twice"):
            read_documents(tmp_path / "in" / name, include=[name])
    for name in ("a.parquet", "b.arrow", "c.csv"):
        (tmp_path / "in" / name).unlink()
    (tmp_path / "in" / "d.csv").write_text("text,n,n\none,1,2\n")
    assert [document.text for document in read_documents(tmp_path / "in" / "d.csv")[0]] == ["one"]


def test_halves_of_surrogate_pairs_go_from_names_and_addresses(tmp_path: Path) -> None:
    """JSON can spell them, and tars have names that are no UTF-8."""
    (tmp_path / "a.jsonl").write_text('{"text": "one", "url": "http://x.org/\\ud800"}\n{"text": 1}')
    name = os.fsdecode(b"caf\xe9")
    files = {f"{name}xxx.txt": b"two", f"{name}xxxx.json": b"{", f"{name}xxx.lnk": b""}
    members = [*map(make_member, files, files.values()), make_member(f"{name}.txt", type=tarfile.SYMTYPE)]
    write_file(tmp_path / "b.tar", make_tar(*members))
    result, read = read_documents(tmp_path / "x", on_error="skip")
    assert [one.text for one in result] == ["one", "two"]
    output = [*result[0].to_list(), *result[1].to_list(), read.counts.as_json(), read._inputs.bad]
    assert "\ufffd" in str(output)
    json.dumps(output, ensure_ascii=False, default=str).encode()


def test_formats_by_name(tmp_path: Path) -> None:
    config = ReadConfig(folder=str(tmp_path))
    (tmp_path / "page.xml").write_text("<html/>")
    for name, format_ in {"A.JSONL": "jsonl", "x.py": "text", "page.xml": "text", "b.tgz": "webdataset"}.items():
        assert formatted(tmp_path / name, config) == format_
    assert formatted(tmp_path / "x.py", ReadConfig(folder=str(tmp_path), format="jsonl")) == "jsonl"
    beginnings = {
        '\ufeff [\n {"text": "x"}]': "json",
        '\ufeff{"text": "x {}"}\r\n\r\n{"text": "y"}\r\n': "jsonl",
        f'{{"text": "{"x" * 100_000}"}}\n{{"text": "y"}}': "jsonl",
        '{"text": "x"}\n': "text",
        '{\n"a": {"b": 1},\n"c": {"d": 2}\n}': "text",
        '{"a":\n{"b": 1},\n"c": {"d": 2}}': "text",
    }
    for beginning, format_ in beginnings.items():
        (tmp_path / "x.json").write_text(beginning, newline="")
        assert formatted(tmp_path / "x.json", config) == format_, beginning[:50]
    (tmp_path / "x.json").write_text("{}")
    by_name = {formatted(tmp_path / f"x{end}", config) for ends in FORMATS.values() for end in ends}
    assert by_name == set(FORMATS) - {"json"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # warcio closes none of its buffers
def test_bodies_of_answers_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are written by another library: all encodings of HTTP, headers left by a crawler, and damaged bodies."""
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
                headers = [("Content-Type", "text/html; charset=utf-8"), *headers]
                http = StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1")
                address = f"https://example.org/{number}"
                content = {"payload": io.BytesIO(body), "http_headers": http}
                writer.write_record(writer.create_warc_record(address, "response", **content))
            requested = StatusAndHeaders("GET / HTTP/1.1", [("Host", "example.org")], is_http_request=True)
            writer.write_record(
                writer.create_warc_record(
                    "https://example.org/", "request", payload=io.BytesIO(), http_headers=requested
                )
            )
        with monkeypatch.context() as patch:
            patch.setattr("megatfm.data_prep.readers.web.MAX_RECORD_BYTES", 10_000)
            result = list(get_reader("warc")(tmp_path / name, ReadConfig(folder=str(tmp_path))))
        texts = [(one.url, one.text) for one in result if not isinstance(one, BadRecord)]
        assert texts == [(f"https://example.org/{number}", text) for number in range(len(good))]
        rubbish, bomb = (one.reason for one in result if isinstance(one, BadRecord))
        assert rubbish.startswith("can't be understood")
        assert bomb == "is longer than 10,000 bytes once unpacked"


def test_wikitext_loses_its_markup() -> None:
    text = (
        "'''Bold''' [[link|shown]] and [[plain]].<ref>{{cite|x}}</ref>\n[[File:a.jpg|thumb|A [[caption]]]]\n"
        "{{Infobox|name=x}}\n== Title ==\n{| class=x\n|a cell\n|}\n* item &amp; more\n[[Category:Cats]]"
    )
    actual = strip_wikitext(text)
    assert actual.startswith("Bold shown and plain.")
    assert "Title" in actual
    assert "item & more" in actual
    for removed in ("cite", "thumb", "caption", "Infobox", "a cell", "Category", "[[", "{{", "'''"):
        assert removed not in actual


def test_a_key_of_json_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """A dictionary would have the last value alone. Keys that nobody asks for may repeat, as columns may."""
    fine, at_top = '{"text": "a", "n": 1, "n": 2}', '{"text": "x", "text": "y"}'
    inside = '{"text": "a", "m": {"at": 1, "at": 2}}'
    (tmp_path / "in").mkdir()
    write_file(tmp_path / "in" / "a.jsonl", f"{fine}\n{at_top}\n{inside}\n".encode())
    write_file(tmp_path / "in" / "b.json", f"[{fine}, {at_top}, {inside}]".encode())
    records = {"1.json": fine, "2.json": at_top, "3.json": inside, "4.json": inside, "4.txt": "a"}
    write_file(tmp_path / "in" / "c.tar", pack_tar({name: text.encode() for name, text in records.items()}))
    for name, n_records in (("a.jsonl", 3), ("b.json", 3), ("c.tar", 4)):
        with pytest.raises(MegatfmError, match=rf"{name}: record 2 has a key twice: 'text'"):
            read_documents(tmp_path / "in" / name, include=[name])
        for keys, expected in (((), 1), (("m",), n_records - 1), (("m.at",), n_records - 1), (("*",), n_records)):
            result, read = read_documents(tmp_path / "in", include=[name], on_error="skip", metadata_keys=keys)
            assert read.counts.dropped["key_twice"].documents == expected, (name, keys)
            assert len(result) == n_records - expected
