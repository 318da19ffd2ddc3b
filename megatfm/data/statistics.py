"""What a corpus holds, in tables for people: lengths, sources, ids."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus

LARGEST = 20
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


def stats(folder: str | Path, piece: Callable[[int], str] | None = None) -> str:
    """Lengths of documents, the largest sources (the first folder or the file of each), and the commonest ids.

    piece: what an id stands for. Reads the whole corpus.
    """
    corpus = Corpus.open(folder)
    lengths = corpus.lengths()
    documents, tokens, text = Counter[str](), Counter[str](), Counter[str]()
    uses = np.zeros(0, np.int64)
    for block in range(corpus.n_blocks):
        for sample in corpus.samples(block):
            name = sample.source.partition("#")[0].partition("/")[0] or "(no name)"
            documents[name] += 1
            tokens[name] += len(sample.tokens)
            text[name] += sample.text_bytes
            found = np.bincount(sample.tokens)
            uses = np.pad(uses, (0, max(0, len(found) - len(uses))))
            uses[: len(found)] += found
    parts = [
        f"{corpus.n_samples:,} documents, {corpus.n_tokens:,} tokens, {corpus.n_text_bytes:,} bytes of text",
        _table(("tokens a document", "at most"), _percentiles(lengths)),
        _table(("documents of up to", "documents", "tokens", "of all tokens"), _by_length(lengths)),
        _table(
            ("source", "documents", "tokens", "bytes of text"),
            [
                (name, f"{documents[name]:,}", f"{n:,}", f"{text[name]:,}")
                for name, n in sorted(tokens.items(), key=lambda item: (-item[1], item[0]))[:LARGEST]
            ],
        ),
    ]
    if len(tokens) > LARGEST:
        parts[-1] += f"\nand {len(tokens) - LARGEST:,} more"
    if uses.any():
        common = np.argsort(-uses, kind="stable")[: min(LARGEST, int((uses > 0).sum()))].tolist()
        rows = [(str(i), repr(piece(i)) if piece else "", f"{uses[i]:,}") for i in common]
        parts.append(f"{int((uses > 0).sum()):,} ids occur\n" + _table(("id", "piece", "times"), rows))
    return "\n\n".join(parts)


def _percentiles(lengths: NDArray[np.int64]) -> list[Sequence[str]]:
    found = np.percentile(lengths, PERCENTILES, method="higher").astype(int).tolist()
    rows: list[Sequence[str]] = [(f"{p} %", f"{n:,}") for p, n in zip(PERCENTILES, found, strict=True)]
    return [*rows, ("all", f"{lengths.max():,}")]


def _by_length(lengths: NDArray[np.int64]) -> list[Sequence[str]]:
    """By powers of two."""
    sizes = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    rows: list[Sequence[str]] = []
    for size in np.unique(sizes).tolist():
        here = lengths[sizes == size]
        share = here.sum() / max(1, lengths.sum())
        rows.append((f"{2**size:,}", f"{len(here):,}", f"{here.sum():,}", f"{share:.1%}"))
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (head, *rows):
        first, *others = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
