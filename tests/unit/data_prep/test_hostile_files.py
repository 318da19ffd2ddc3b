"""Files that lie, no program wrote or claim gigabytes: named, in bounded memory, and the others are used."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.config.prep import LabelsConfig, ReadConfig
from megatfm.data_prep.documents import to_drop_reason
from megatfm.data_prep.input_files import DocumentReader, InputFiles
from megatfm.data_prep.labels import ClassLabels
from megatfm.data_prep.readers import get_reader
from megatfm.data_prep.readers.images import ImageRecord, make_record
from megatfm.data_prep.readers.record import BadFileError, BadRecord, open_decompressed
from megatfm.errors import MegatfmError
from tests.support.images import encode_noise
from tests.support.prep_files import warc_record, write_file
from tests.support.text_files import FILES, formatted, read_documents, tar, warc
from tests.support.webdatasets import forge_header, make_member, make_sparse_tar, make_tar, pack_tar

FOUND_BY_FUZZING = {
    "stream.arrow": (b"text", b"\xdcext"),  # a name of a column that is no UTF-8
    "file.arrow": (b"url", b"\xf5rl"),
    "b.xml": (b"<ns>0</ns>", b"<ns>x</ns>"),
    "c.xml": (b"2024-01-01T00:00:00Z", b"yesterday"),
}


@pytest.mark.parametrize("name", FOUND_BY_FUZZING)
def test_files_that_fuzzing_found_are_refused(tmp_path: Path, name: str) -> None:
    good, bad = FOUND_BY_FUZZING[name]
    path = write_file(tmp_path / "in" / name, FILES[name if name in FILES else "a.xml"]().replace(good, bad))
    with pytest.raises(MegatfmError, match="is no whole"):
        read_documents(path)


DELETED = re.sub(rb"(?s)<text.*?</text>", b'<text deleted="deleted" />', FILES["a.xml"]())
REFUSED = {
    "a.json": (b'"a text"', "is no array of records"),
    "a.warc": (b"WARC/1.0\r\n" + b"a: b\r\n" * 2000, "record 1 has a header without an end"),
    "b.warc": (b"WARC/1.0\r\nContent-Length: 99999999999\r\n\r\n", "record 1 is longer than 268,435,456 bytes"),
    "c.warc": (warc_record("resource", b"x", "http://a", "image/png"), "is no text but image/png"),
    "d.xml": (DELETED, "has no text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_a_text_are_refused(tmp_path: Path, name: str) -> None:
    data, reason = REFUSED[name]
    settings = {"format": "json"} if name == "a.json" else {}
    with pytest.raises(MegatfmError, match=reason):
        read_documents(write_file(tmp_path / "in" / name, data), **settings)


def test_tars_with_what_is_no_file(tmp_path: Path) -> None:
    kinds = {"../out.txt": tarfile.SYMTYPE, "dev.txt": tarfile.CHRTYPE, "dir": tarfile.DIRTYPE}
    special_members = [make_member(name, type=kind, linkname="/etc/passwd") for name, kind in kinds.items()]
    files = {"b.txt": b"good", "c.txt": b"\xff", "d.jpg": b"x", "e.json": b"{"}
    twice = [("f.txt", b"one"), ("f.TXT", b"two"), ("g.txt", b"good"), ("g.jpg", b""), ("g.jpg", b"")]
    twice += [("h.txt", b"one"), ("h.text", b"another")]
    members = [*special_members, *(make_member(name, data) for name, data in (*files.items(), *twice))]
    path = write_file(tmp_path / "in" / "a.tar", make_tar(*members))
    result = list(get_reader("webdataset")(path, ReadConfig(folder=str(path.parent))))
    assert [one.text for one in result if not isinstance(one, BadRecord)] == ["good", "good"]
    assert {one.key: one.reason for one in result if isinstance(one, BadRecord)} == {
        "../out": "has a link or device: ../out.txt",
        "dev": "has a link or device: dev.txt",
        "c": "has a member that is not valid UTF-8: c.txt, at byte 0",
        "d": "has no .txt and no .json with a field 'text'",
        "e": "has a member that is not JSON: e.json",
        "f": "has a .txt twice",
        "h": "has a .txt and a .text: one of them is its text",
    }


def test_tars_that_the_library_takes_for_whole(tmp_path: Path) -> None:
    without_end = tar().rstrip(b"\0")
    path = write_file(tmp_path / "in" / "a.tar", without_end + bytes(-len(without_end) % 512))
    with pytest.raises(MegatfmError, match="the blocks that end it are missing"):
        read_documents(path)
    for behind in (tar(), b"junk", bytes(20_000) + b"x"):
        path.write_bytes(tar() + behind)
        with pytest.raises(MegatfmError, match=r"data follows its end, before byte [0-9]+: if tars were joined"):
            read_documents(path)
    path.write_bytes(tar() + bytes(20_000))
    assert len(read_documents(path)) > 0
    path.write_bytes(make_tar(make_member("x" * 10, type=tarfile.XHDTYPE, size=2**40)) + bytes(1024))
    with pytest.raises(MegatfmError, match="a header of 1,099,511,627,776 bytes"):
        read_documents(path)


def extended(record: bytes, then: bytes) -> bytes:
    """A header of POSIX.1-2001 with one record, and what it is about."""
    return forge_header("x", len(record), tarfile.XHDTYPE) + record.ljust(-(-len(record) // 512) * 512, b"\0") + then


DATA = b"abc".ljust(512, b"\0")
FORGED = {
    "an image of 2⁶² bytes": (forge_header("a.jpg", 2**62) + DATA, "a member's size leads past the end of the file"),
    "a text": (forge_header("a.txt", 2**62) + DATA, "a member's size leads past the end of the file"),
    "of no known type": (forge_header("a.txt", 2**62, b"Z") + DATA, "a member's size leads past the end of the file"),
    "by its extension": (extended(b"28 size=4611686018427387904\n", forge_header("a.jpg", 3) + DATA),
                         "a member's size leads past the end of the file"),
    "a negative one": (forge_header("a.jpg", -(2**60)) + DATA, "seeking backwards"),
    "a sparse file": (forge_header("a.txt", 3, tarfile.GNUTYPE_SPARSE, at_482=b"\1"), "a sparse file: 'a.txt': write"),
    **{f"a sparse file of POSIX, {version}": (make_sparse_tar("a.txt", version), "a sparse file: 'a.txt': write")
       for version in ("0.0", "0.1", "1.0")},
    "a length of 5,000 digits": (extended(b"9" * 5000 + b" size=3\n", forge_header("a.jpg", 3) + DATA), "no whole tar"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
@pytest.mark.parametrize("packed", [False, True])
def test_sizes_are_held_against_the_files(tmp_path: Path, case: str, packed: bool) -> None:
    """The library goes through a member of 2⁶² bytes block by block, for hours."""
    data, reason = FORGED[case]
    path = tmp_path / ("a.tar.gz" if packed else "a.tar")
    path.write_bytes(gzip.compress(data + bytes(1024)) if packed else data + bytes(1024))
    with pytest.raises(BadFileError, match=reason):
        list(get_reader("webdataset")(path, ReadConfig(folder=str(tmp_path))))


def test_a_record_of_a_length_of_5000_digits(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(warc().replace(b"Content-Length: ", b"Content-Length: " + b"9" * 5000, 1))
    with pytest.raises(BadFileError, match="is cut off or damaged in the header of record 1"):
        list(get_reader("warc")(tmp_path / "a.warc", ReadConfig(folder=str(tmp_path))))


def test_endless_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.data_prep.readers.text.MAX_RECORD_BYTES", 10_000)
    for name, data in (("a.jsonl", b" " * 20_000), ("a.jsonl.gz", gzip.compress(b" " * 20_000))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadFileError, match="line 1 is longer than 10,000 bytes"):
            list(get_reader("jsonl")(tmp_path / name, ReadConfig(folder=str(tmp_path))))


@settings(max_examples=60)
@given(
    data=st.binary(max_size=400),
    name=st.sampled_from([name for name in FILES if name != "a.xml"]),
    at=st.integers(0, 10**6),
)
def test_no_bytes_crash_a_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, at: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / name
    full = FILES[name]()
    cut = at % (len(full) + 1)
    path.write_bytes(full[:cut] + data + full[cut + len(data) :])
    with contextlib.suppress(BadFileError):
        kind = "json" if name == "a.json" else formatted(path, ReadConfig(folder="x"))
        list(get_reader(kind)(path, ReadConfig(folder="x")))


MOST = 2**18
LONG = 2**26
GOOD = json.dumps({"text": "good"}).encode() + b"\n"


def zeros(blocks: int) -> bytes:
    """A zstd frame of blocks of 128 KiB of one repeated byte, by hand: RFC 8878, sections 3.1.1.1 and 3.1.1.2."""
    block = (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"0"
    last = (1 | 1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"0"
    return b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x58" + block * (blocks - 1) + last


def gzipped_tar(name: str, size: int, count: int = 1) -> bytes:
    """A tar of the same member again and again."""
    (info, data), padding = make_member(name, bytes(size)), bytes(-size % 512)
    return gzip.compress((info.tobuf(tarfile.GNU_FORMAT) + data + padding) * count + bytes(1024), compresslevel=1)


def gzipped_warc() -> bytes:
    body = gzip.compress(bytes(LONG))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}"
    content = f"{head}\r\n\r\n".encode() + body
    return warc_record("response", content, "http://x.org", "application/http; msgtype=response")


def parquet(kind: pyarrow.DataType) -> bytes:
    """A text of 256 KiB, stored once, that 600 rows have, and one that is too long."""
    texts = pyarrow.array(["x" * MOST] * 600 + ["y" * (MOST + 1)], kind)
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
    return sink.getvalue()


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.jsonl.zst": (lambda: zeros(80_000), "unreadable_file"),
    "a.jsonl.gz": (lambda: gzip.compress(bytes(LONG), compresslevel=1), "unreadable_file"),
    "a.jsonl.bz2": (lambda: bz2.compress(bytes(LONG)), "unreadable_file"),
    "a.jsonl.xz": (lambda: lzma.compress(bytes(LONG), preset=0), "unreadable_file"),
    "a.tar.gz": (lambda: gzipped_tar("a.txt", LONG), "member_of_over_262_144_bytes"),
    "b.tar.gz": (lambda: gzipped_tar("a.json", 2**17, 400), "members_of_over_262_144_bytes"),
    "c.tar.gz": (lambda: gzipped_tar("a.txt", 0, 20_000), "unreadable_file"),
    "a.warc": (gzipped_warc, "longer_than_262_144_bytes_once_unpacked"),
    "a.parquet": (lambda: parquet(pyarrow.string()), "longer_than_262_144_bytes"),
    "b.parquet": (lambda: parquet(pyarrow.large_string()), "longer_than_262_144_bytes"),
    "c.parquet": (lambda: parquet(pyarrow.string_view()), "longer_than_262_144_bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_little_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = BOMBS[name]
    (tmp_path / name).write_bytes(make())
    (tmp_path / "z.jsonl").write_bytes(GOOD)
    for module in ("text", "record", "web", "webdataset", "tables"):
        monkeypatch.setattr(f"megatfm.data_prep.readers.{module}.MAX_RECORD_BYTES", MOST)
    read = DocumentReader(InputFiles(ReadConfig(folder=str(tmp_path), on_error="skip")), 2**20)
    tracemalloc.start()
    try:
        for document in read.iter_documents(lambda _: None):
            last = document
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last.text == "good"
    assert peak < 2**25
    assert any(item.startswith(reason) for item in read.counts.dropped), read.counts.dropped


@pytest.mark.parametrize("suffix", [".zst", ".xz", ".bz2"])
def test_files_under_compression_are_as_their_library_says(suffix: str, tmp_path: Path) -> None:
    lines = [b"x" * 1000 + b"\n", b"\n", b"%d\n" * 20_000, b"", b"no end"]
    if suffix == ".zst":
        plain, checked = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(level=19, write_checksum=True)
        unsized = zstandard.ZstdCompressor(write_content_size=False)
        compressors = (plain, zstandard.ZstdCompressor(write_checksum=True), unsized, checked)
        packed = [compressors[n % 4].compress(line) for n, line in enumerate(lines)]
        packed.insert(2, b"\x5a\x2a\x4d\x18\x05\x00\x00\x00-skip")
    elif suffix == ".xz":
        packed = [lzma.compress(line) + bytes(4 * (n % 3)) for n, line in enumerate(lines)]
    else:
        packed = [bz2.compress(line) for line in lines]
    full, path = b"".join(packed), tmp_path / f"a{suffix}"
    path.write_bytes(full)
    with open_decompressed(path) as file:
        assert file.read() == b"".join(lines)
    with open_decompressed(path) as file:
        assert list(file) == b"".join(lines).splitlines(keepends=True)
    ends = {sum(map(len, packed[:number])) for number in range(len(packed) + 1)}
    for end in {*range(0, len(full), 7), *(end - 1 for end in ends if end)}:
        path.write_bytes(full[:end])
        is_between = end in ends or (suffix == ".xz" and not full[end : min(e for e in ends if e >= end)].strip(b"\0"))
        with contextlib.nullcontext() if is_between else pytest.raises(BadFileError), open_decompressed(path) as file:
            assert b"".join(lines).startswith(file.read())


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_damaged_beginning_of_a_stream_is_refused(suffix: str, tmp_path: Path) -> None:
    """Zeros are refused, too: a crash can leave them in place of a file. An empty file is read as nothing."""
    path = tmp_path / f"a{suffix}"
    stream = COMPRESSORS[suffix](b"text")
    for data in (stream + b"x" + stream[1:], bytes(1000)):
        path.write_bytes(data)
        with pytest.raises(BadFileError, match="is damaged or cut off"), open_decompressed(path) as file:
            file.read()
    path.write_bytes(b"")
    with open_decompressed(path) as file:
        assert file.read() == b""


def test_a_drop_reason_has_no_part_that_differs_from_record_to_record(tmp_path: Path) -> None:
    """Each reason is a row of the report, and a corpus may have millions of bad records."""
    config = ReadConfig(folder=str(tmp_path))
    png, jpg = encode_noise(), encode_noise(format_="JPEG")
    images: list[dict[str, bytes]] = [
        *({"jpg": jpg, "txt": b"x" * n + b"\xff"} for n in (3, 5)),
        *({"png": png[:-n]} for n in (20, 30, 100)),
        *({f"{n}.jpg": jpg for n in range(count)} for count in (66, 67)),
        *({"txt": b"", **dict.fromkeys(names, jpg)} for names in (("jpg", "jpeg"), ("jpg", "0.jpg"))),
    ]
    bad: list[object] = [make_record("a", members, config) for members in images]
    labels = ClassLabels(LabelsConfig(by="txt", classes=str(write_file(tmp_path / "classes", b"a"))), ["a.jpg"])
    bad += [labels.apply("a", ImageRecord("a", {"jpg": jpg, "txt": text}, "")) for text in (b"x", b"y")]
    path = write_file(tmp_path / "a.csv", b"text,n\na\na,1,2\n")
    bad += [one for one in get_reader("csv")(path, config) if isinstance(one, BadRecord)]
    path = write_file(tmp_path / "a.tar", pack_tar({"a.txt": b"\xff", "b.txt": b"x\xff"}))
    bad += get_reader("webdataset")(path, config)
    reasons = [to_drop_reason(one.reason) for one in bad if isinstance(one, BadRecord)]
    assert len(reasons) == 15
    assert {reason: reasons.count(reason) for reason in reasons} == {
        "txt_that_is_not_valid_utf_8": 2,
        "png_that_is_no_whole_png": 3,
        "image_whose_number_is_not_0_to_64_without_leading_zeros": 2,
        "several_images_without_numbers": 2,
        "label_that_is_none_of_the_1_of_read_labels_classes": 2,
        "another_number_of_cells_than_the_first_row": 2,
        "member_that_is_not_valid_utf_8": 2,
    }
