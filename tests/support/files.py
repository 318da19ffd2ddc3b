"""Files of JSON lines, and files that are damaged."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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
