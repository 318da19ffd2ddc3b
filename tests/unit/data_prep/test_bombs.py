"""Small files that claim to hold gigabytes: refused in bounded memory, and the rest of the corpus is used."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.input_files import DocumentReader, InputFiles
from megatfm.data_prep.readers.record import BadFileError, open_decompressed
from tests.support.prep_files import warc_record

MOST = 2**18
LONG = 2**26
GOOD = json.dumps({"text": "good"}).encode() + b"\n"


def zeros(blocks: int) -> bytes:
    """A zstd frame of blocks of 128 KiB of one repeated byte, by hand: RFC 8878, sections 3.1.1.1 and 3.1.1.2."""
    block = (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"0"
    last = (1 | 1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"0"
    return b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x58" + block * (blocks - 1) + last


def tar(*members: tuple[str, int]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as archive:
        for name, size in members:
            member = tarfile.TarInfo(name)
            member.size = size
            archive.addfile(member, io.BytesIO(bytes(size)))
    return sink.getvalue()


def warc() -> bytes:
    body = gzip.compress(bytes(LONG))
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}"
    )
    return warc_record(
        "response", f"{head}\r\n\r\n".encode() + body, "http://x.org", "application/http; msgtype=response"
    )


def parquet() -> bytes:
    """A text of 256 KiB, stored once, that 600 rows have, and one that is too long."""
    texts = pyarrow.array(["x" * MOST] * 600 + ["y" * (MOST + 1)]).dictionary_encode()
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
    return sink.getvalue()


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.jsonl.zst": (lambda: zeros(80_000), "unreadable_file"),
    "a.jsonl.gz": (lambda: gzip.compress(bytes(LONG)), "unreadable_file"),
    "a.jsonl.bz2": (lambda: bz2.compress(bytes(LONG)), "unreadable_file"),
    "a.jsonl.xz": (lambda: lzma.compress(bytes(LONG)), "unreadable_file"),
    "a.tar.gz": (lambda: tar(("a.txt", LONG)), "member_of_over_262_144_bytes"),
    "b.tar.gz": (lambda: tar(*[("a.json", 2**17)] * 999), "members_of_over_262_144_bytes"),
    "c.tar.gz": (lambda: tar(*[("a.txt", 0)] * 20_000), "unreadable_file"),
    "a.warc": (warc, "longer_than_262_144_bytes_once_unpacked"),
    "a.parquet": (parquet, "longer_than_262_144_bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_memory_and_the_rest_is_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = BOMBS[name]
    (tmp_path / name).write_bytes(make())
    (tmp_path / "z.jsonl").write_bytes(GOOD)
    for module in ("text", "record", "web", "webdataset", "tables"):
        monkeypatch.setattr(f"megatfm.data_prep.readers.{module}.MAX_RECORD_BYTES", MOST)
    read = DocumentReader(InputFiles(ReadConfig(folder=str(tmp_path), on_error="skip")), 2**20)
    tracemalloc.start()
    try:
        for document in read.documents(lambda _: None):
            last = document
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last.text == "good"
    assert peak < 2**25
    assert any(item.startswith(reason) for item in read.counts.dropped), read.counts.dropped


@pytest.mark.parametrize("suffix", [".zst", ".xz"])
def test_files_under_compression_are_as_their_library_says(suffix: str, tmp_path: Path) -> None:
    """Frames of every kind one after the other, whole, and cut at every byte."""
    lines = [b"x" * 1000 + b"\n", b"\n", b"%d\n" * 20_000, b"", b"no end"]
    if suffix == ".zst":
        compressors = (
            zstandard.ZstdCompressor(),
            zstandard.ZstdCompressor(write_checksum=True),
            zstandard.ZstdCompressor(write_content_size=False),
            zstandard.ZstdCompressor(level=19, write_checksum=True),
        )
        packed = [compressors[n % 4].compress(line) for n, line in enumerate(lines)]
        packed.insert(2, b"\x5a\x2a\x4d\x18\x05\x00\x00\x00-skip")
    else:
        packed = [lzma.compress(line) + bytes(4 * (n % 3)) for n, line in enumerate(lines)]
    full, path = b"".join(packed), tmp_path / f"a{suffix}"
    path.write_bytes(full)
    with open_decompressed(path) as file:
        assert file.read() == b"".join(lines)
    with open_decompressed(path) as file:
        assert list(file) == b"".join(lines).splitlines(keepends=True)
    ends = {sum(map(len, packed[:number])) for number in range(len(packed) + 1)}
    for end in {*range(0, len(full), 7), *(end - 1 for end in ends if end)}:
        path.write_bytes(full[:end])
        is_between = end in ends or (
            suffix == ".xz" and not full[end : min(e for e in ends if e >= end)].strip(b"\0")
        )
        with (
            contextlib.nullcontext() if is_between else pytest.raises(BadFileError),
            open_decompressed(path) as file,
        ):
            assert b"".join(lines).startswith(file.read())
