"""What a corpus holds, in tables for people: lengths, sources, ids."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus
from megatfm.data.members import Sample

LARGEST = 20
MOST_VALUES = 10_000
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


def stats(folder: str | Path, decode_id: Callable[[int], str] | None = None) -> str:
    """Lengths of documents, the largest sources (the first folder or the file of each), domains and values of fields,
    and the commonest ids.

    decode_id: what an id stands for. Reads the whole corpus.
    """
    corpus = Corpus.open(folder)
    lengths = corpus.lengths()
    by_source, by_field = _Totals("source"), dict[str, _Totals]()
    uses = np.zeros(0, np.int64)
    for block in range(corpus.n_blocks):
        for sample in corpus.read_block_samples(block):
            name = sample.source.partition("#")[0].partition("/")[0] or "(no name)"
            by_source.add(name, sample)
            for field, value in countable_fields(sample.metadata).items():
                by_field.setdefault(field, _Totals(field)).add(value, sample)
            found = np.bincount(sample.tokens)
            uses = np.pad(uses, (0, max(0, len(found) - len(uses))))
            uses[: len(found)] += found
    parts = [
        f"{corpus.n_samples:,} documents, {corpus.n_tokens:,} tokens, {corpus.n_text_bytes:,} bytes of text",
        _table(("tokens a document", "at most"), _percentiles(lengths)),
        _table(("documents of up to", "documents", "tokens", "of all tokens"), _by_length(lengths)),
        by_source.table(),
        *(each.table() for each in by_field.values()),
    ]
    if uses.any():
        common = np.argsort(-uses, kind="stable")[: min(LARGEST, int((uses > 0).sum()))].tolist()
        rows = [(str(i), repr(decode_id(i)) if decode_id else "", f"{uses[i]:,}") for i in common]
        parts.append(f"{int((uses > 0).sum()):,} ids occur\n" + _table(("id", "piece", "times"), rows))
    return "\n\n".join(parts)


def countable_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """What documents are counted by: the domain of a URL, and each field that is a word, a number or a truth value."""
    found = {
        name: str(value) for name, value in fields.items() if isinstance(value, str | int | float | bool)
    }
    return {"domain": domain(found.pop("url")), **found} if "url" in found else found


def domain(url: str) -> str:
    """The host of an address, without `www.`; empty if it has none."""
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0]
    return host.lower().removeprefix("www.")


class _Totals:
    """Documents, tokens and bytes of text by the values of something; of too many values only how many there are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._of: dict[str, list[int]] = {}
        self._is_full = False

    def add(self, value: str, sample: Sample) -> None:
        self._is_full |= len(self._of) > MOST_VALUES
        if not self._is_full:
            total = self._of.setdefault(value, [0, 0, 0])
            for at, n in enumerate((1, len(sample.tokens), sample.text_bytes)):
                total[at] += n

    def table(self) -> str:
        if self._is_full:
            return f"{self._name}: more than {MOST_VALUES:,} values"
        largest = sorted(self._of.items(), key=lambda item: (-item[1][1], item[0]))[:LARGEST]
        rows = [(name, *(f"{n:,}" for n in total)) for name, total in largest]
        more = len(self._of) - LARGEST
        return _table((self._name, "documents", "tokens", "bytes of text"), rows) + (
            f"\nand {more:,} more" if more > 0 else ""
        )


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
