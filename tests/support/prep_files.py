"""Files that data_prep reads and writes."""

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import zstandard
from blake3 import blake3


def write_file(path: Path, data: bytes) -> Path:
    """Write a file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def file_hashes(folder: Path) -> dict[str, str]:
    """The BLAKE3 hash of every file below a folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def one_by_one(
    step: str,
    count: int,
    total: int,
    work: Callable[[int, Callable[[int], None]], dict[str, Any]],
    join: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """All tasks of a step of a search, in an order by chance; every other one is done twice."""
    order = random.Random(step).sample(range(count), count)
    parts = {number: work(number, lambda _: None) for number in [*order, *order[::2]]}
    return join(parts[number] for number in range(count))


def shard_texts(out: Path, split: str) -> dict[str, str]:
    """Source → text of all samples of a split."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    texts: dict[str, str] = {}
    for shard in sorted((out / split).glob("*.tar.zst")):
        stream = zstandard.ZstdDecompressor().stream_reader(shard.read_bytes(), read_across_frames=True)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        for name, data in members.items():
            if name.endswith(".meta.json"):
                meta = json.loads(data)
                ids = np.load(io.BytesIO(members[name.replace("meta.json", "tokens.npy")]))
                many = "keys" in meta
                parts = np.split(ids, np.cumsum(meta["tokens"])[:-1]) if many else [ids]
                sources = meta["sources"] if many else [meta["source"]]
                sizes = meta["bytes"] if many else [meta["bytes"]]
                for source, size, part in zip(sources, sizes, parts, strict=True):
                    texts[source] = tokenizer.decode(part.tolist())
                    assert len(texts[source].encode()) == size
    return texts


def warc_record(kind: str, content: bytes, url: str, type_: str) -> bytes:
    """One record of a WARC file."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\nContent-Type: {type_}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"
