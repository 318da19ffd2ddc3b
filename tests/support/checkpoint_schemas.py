"""A checkpoint's metadata, changed and given the right hash, as no accident would, or as earlier versions wrote it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

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
