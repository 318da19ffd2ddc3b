"""Files that lie, or that no program wrote: they are named, and what came before them can be used."""

import contextlib
import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers import get_reader
from megatfm.data_prep.readers.record import Bad, BadFileError
from megatfm.errors import MegatfmError
from tests.support.text_files import FILES, formatted, read_documents, tar, warc

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
        read_documents(path)


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
    result = list(get_reader("webdataset")(path, ReadConfig(folder=str(path.parent))))
    assert [each.text for each in result if not isinstance(each, Bad)] == ["good"]
    assert {each.key: each.reason for each in result if isinstance(each, Bad)} == {
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
        read_documents(path)
    bomb = tarfile.TarInfo("x" * 10)
    bomb.type, bomb.size = tarfile.XHDTYPE, 2**40
    path.write_bytes(bomb.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(MegatfmError, match="a header of 1,099,511,627,776 bytes"):
        read_documents(path)


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
        list(get_reader("webdataset")(path, ReadConfig(folder=str(tmp_path))))


def test_a_record_of_a_length_of_5000_digits(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(
        warc().replace(b"Content-Length: ", b"Content-Length: " + b"9" * 5000, 1)
    )
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
def test_no_bytes_bring_a_reader_down(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, at: int
) -> None:
    """Rubbish in the place of a part of a good file: records, or an error that is meant."""
    path = tmp_path_factory.mktemp("fuzz") / name
    full = FILES[name]()
    cut = at % (len(full) + 1)
    path.write_bytes(full[:cut] + data + full[cut + len(data) :])
    with contextlib.suppress(BadFileError):
        kind = "json" if name == "a.json" else formatted(path, ReadConfig(folder="x"))
        list(get_reader(kind)(path, ReadConfig(folder="x")))
