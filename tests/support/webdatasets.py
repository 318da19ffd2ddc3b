"""Shards as the webdataset library writes them, and as an enemy would."""

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
import zstandard

HASH = "f" * 64
Member = tuple[tarfile.TarInfo, bytes]


def encode_npy(tokens: Any) -> bytes:
    """Bytes of an array as `.npy`."""
    file = io.BytesIO()
    np.save(file, np.asarray(tokens))
    return file.getvalue()


def make_member(name: str, data: bytes = b"", **changes: Any) -> Member:
    """A member of a tar, whose header may lie."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def make_tar(*members: Member) -> bytes:
    """A tar written header by header, so that it may lie."""
    data = b"".join(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512) for info, data in members)
    return data + bytes(1024)


def forge_header(name: str, size: int, kind: bytes = tarfile.REGTYPE, **fields: bytes) -> bytes:
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


def make_sparse_tar(name: str, version: str) -> bytes:
    """A POSIX tar by GNU tar with a file that is one hole. version: of the map of holes, 0.0, 0.1 or 1.0."""
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / name).open("wb") as file:
            file.truncate(2**20)
        command = ["tar", "--format=posix", "--sparse", f"--sparse-version={version}", "-C", folder, "-cf", "-", name]
        return subprocess.run(command, check=True, capture_output=True).stdout


def pack_tar(files: Mapping[str, bytes]) -> bytes:
    """A tar of files by name."""
    return make_tar(*(make_member(name, data) for name, data in files.items()))


def draw_documents(n: int = 40) -> list[np.ndarray]:
    """Documents of random tokens."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, 4000, draw.integers(1, 400)).astype(np.uint16) for _ in range(n)]


def write_wds(folder: Path, texts: list[np.ndarray], kind: str) -> Path:
    """Write two shards by the webdataset library: as tar, as tar.zst of several frames, or of one.

    Frames "of a pipe" don't say how many bytes they hold.
    """
    folder.mkdir()
    for number, part in enumerate((texts[:25], texts[25:])):
        path = folder / f"some-{number}.tar"
        with wds.TarWriter(str(path)) as writer:
            for i, tokens in enumerate(part):
                writer.write({"__key__": f"sub/{i:03d}", "json": {"i": i}, "tokens.npy": tokens})
        if kind == "tar":
            continue
        data, cuts = path.read_bytes(), [0]
        with tarfile.open(path) as archive:
            starts = [m.offset for m in archive.getmembers() if m.name.endswith("json")]
        cuts = [0, *starts[5::5], len(data)] if kind.startswith("frames") else [0, len(data)]
        compressor = zstandard.ZstdCompressor(write_content_size=kind != "frames of a pipe")
        frames = [compressor.compress(data[a:b]) for a, b in pairwise(cuts)]
        Path(f"{path}.zst").write_bytes(b"".join(frames))
        path.unlink()
    return folder


IDS = encode_npy(np.arange(5, dtype=np.uint16))
GOOD = make_member("0.npy", IDS)
