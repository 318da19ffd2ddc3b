"""Draws what queries see under each attention pattern, from the dense masks that kernels are compared with.

`python docs/draw_patterns.py` writes docs/images/pattern-NAME.svg anew; a test says when that is due.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from megatfm.layers.attention.memory_compressed import MemoryCompressedPattern
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata

IMAGES = Path(__file__).parent / "images"
LENGTH, CELL, RANK = 32, 5, 8
SEEN, MIXED = "#3f51b5", "#b5533f"
"""A token, and one key that is made of several."""

PATTERNS: dict[str, AttentionPattern] = {
    "full": Full(causal=True),
    "window": Window(7),
    "window-two-sides": Window(4, 4),
    "window-dilated": Window(9, step=3),
    "window-first": Window(5, first=2),
    "chunked": Chunked(8, causal=True),
    "strided": Strided(6, causal=True),
    "fixed": Fixed(8, 2, causal=True),
    "bigbird": BigBird(2, 1, 0, 2),
    "bigbird-etc": BigBird(2, 0, 3, 2),
    "longformer": Longformer(3, (0, 17)),
    "compressed": MemoryCompressedPattern(4),
}
PACKED = torch.tensor([0] * 11 + [1] * 5 + [2] * 16)


def drawn(pattern: AttentionPattern, documents: torch.Tensor | None = None) -> str:
    """A square of queries (down) and keys (to the right), dark where a query looks."""
    layout = SequenceMetadata(torch.arange(LENGTH)[None], None if documents is None else documents[None])
    mask = PatternMask(pattern, layout).mask()
    if mask is None:
        mask = torch.ones(LENGTH, LENGTH).tril().bool()[None, None]
    return svg(mask[0, 0].tolist(), pattern.factor if isinstance(pattern, MemoryCompressedPattern) else 0)


def svg(seen: list[list[bool]], summary: int = 0) -> str:
    """Rows of queries, in a square of as many keys as tokens or of fewer, with nothing beside those. summary: so many
    columns are one key, which is set off from the next."""
    width, side = len(seen[0]) * CELL, LENGTH * CELL
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" viewBox="0 0 {side} {side}" '
        'shape-rendering="crispEdges">',
        f'<rect width="{width}" height="{side}" fill="#e8eaf0"/>',
    ]
    for row, columns in enumerate(seen):
        for start, end in runs(columns, summary):
            one = end - start == summary
            place = f'x="{start * CELL}" y="{row * CELL}" width="{(end - start) * CELL - 2 * one}" height="{CELL}"'
            lines.append(f'<rect {place} fill="{MIXED if one else SEEN}"/>')
    return "\n".join([*lines, "</svg>", ""])


def runs(columns: list[bool], summary: int) -> Iterator[tuple[int, int]]:
    """Where columns that are seen begin and end, those of a summary by themselves."""
    start = 0
    while start < len(columns):
        end = start
        while end < len(columns) and columns[end] and not (end > start and summary and end % summary == 0):
            end += 1
        if end > start:
            yield start, end
        start = max(end, start + 1)


def pictures() -> dict[str, str]:
    """File name → SVG."""
    made = {f"pattern-{name}.svg": drawn(pattern) for name, pattern in PATTERNS.items()}
    made["pattern-linformer.svg"] = svg([[True] * RANK] * LENGTH, summary=1)
    return made | {"pattern-packed.svg": drawn(Window(7), PACKED)}


if __name__ == "__main__":
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
