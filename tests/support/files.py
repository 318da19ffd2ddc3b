"""Files of JSON lines, damaged files, and a checkpoint's metadata, changed or as an earlier version wrote it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def flip_bit(path: Path, byte: int = -1) -> None:
    """Flip the lowest bit of a byte."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


METADATA = "metadata.json"


def read_metadata(path: Path) -> dict[str, Any]:
    """Metadata of a checkpoint."""
    body: dict[str, Any] = json.loads((path / METADATA).read_bytes())["metadata"]
    return body


def write_metadata(path: Path, body: dict[str, Any]) -> None:
    """Write the metadata with its hash."""
    raw = json.dumps(body).encode()
    content = b'{"blake3": "%s", "metadata": %s}\n' % (blake3(raw).hexdigest().encode(), raw)
    (path / METADATA).write_bytes(content)


def edit_metadata(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata and give it the right hash."""
    body = read_metadata(path)
    change(body)
    write_metadata(path, body)


def write_schema_1(path: Path) -> None:
    """Rewrite the metadata in schema 1, which lists every piece of every tensor."""
    body = read_metadata(path)
    tensors = {}
    files = list(body["files"])
    for group in body.pop("groups"):
        for place, name in enumerate(group["names"]):
            pieces = []
            for piece in group["pieces"]:
                holders = [number for number, count in piece["runs"] for _ in range(count)]
                ranges = zip(piece["offsets"], piece["sizes"], strict=True)
                cut = ",".join(f"{begin}:{begin + size}" for begin, size in ranges)
                key = name if piece["sizes"] == group["shape"] else f"{name}[{cut}]"
                cells = {"offsets": piece["offsets"], "sizes": piece["sizes"]}
                pieces.append({**cells, "file": files[holders[place]], "key": key})
            tensors[name] = {"dtype": group["dtype"], "shape": group["shape"], "pieces": pieces}
    body |= {"schema_version": 1, "tensors": dict(sorted(tensors.items()))}
    write_metadata(path, body)
