"""Draws what queries see under each attention pattern, from the dense masks that kernels are compared with.

`python docs/draw_patterns.py` writes docs/images/pattern-NAME.svg anew; a test says when that is due.
"""

from pathlib import Path

import torch

from megatfm.layers.attention.patterns import (
    BigBird,
    Chunked,
    Compressed,
    Fixed,
    Full,
    Longformer,
    Pattern,
    Seen,
    Strided,
    Window,
)
from megatfm.layers.sequence import SequenceMetadata

IMAGES = Path(__file__).parent / "images"
LENGTH, CELL = 32, 5
PATTERNS: dict[str, Pattern] = {
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
    "compressed": Compressed(4),
}
PACKED = torch.tensor([0] * 11 + [1] * 5 + [2] * 16)


def drawn(pattern: Pattern, documents: torch.Tensor | None = None) -> str:
    """A square of queries (down) and keys (to the right), dark where a query looks."""
    layout = SequenceMetadata(torch.arange(LENGTH)[None], None if documents is None else documents[None])
    mask = Seen(pattern, layout).mask()
    if mask is None:
        mask = torch.ones(LENGTH, LENGTH).tril().bool()[None, None]
    side = LENGTH * CELL
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" viewBox="0 0 {side} {side}">',
        f'<rect width="{side}" height="{side}" fill="#e8eaf0"/>',
    ]
    for row, seen in enumerate(mask[0, 0].tolist()):
        start = 0
        while start < LENGTH:
            end = start
            while end < LENGTH and seen[end]:
                end += 1
            if end > start:
                place = f'x="{start * CELL}" y="{row * CELL}" width="{(end - start) * CELL}" height="{CELL}"'
                lines.append(f'<rect {place} fill="#3f51b5"/>')
            start = end + 1
    return "\n".join([*lines, "</svg>", ""])


def pictures() -> dict[str, str]:
    """File name → SVG."""
    made = {f"pattern-{name}.svg": drawn(pattern) for name, pattern in PATTERNS.items()}
    return made | {"pattern-packed.svg": drawn(Window(7), PACKED)}


if __name__ == "__main__":
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
