"""Share of padding in rows, by the lengths of documents and of rows: counted, so no clock matters.

    python benchmarks/padding.py [--tokens 20_000_000] [--longest 131_072]

Corpora of documents as long as short sayings, dictionary entries, manual pages and books are written as shards, and
rows planned of them: cut at row ends, and with whole sequences. "Before" is what rows that never span blocks, of
shards in which each document has members of its own, would have: a row is cut short where its block ends.
"""

import tempfile
from pathlib import Path

import common
import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.writer import ShardWriter
from megatfm.data.bin_packing import best_fit_decreasing, measure_padding

# The middle length, and how far lengths spread (of the logarithm).
KINDS = {
    "sayings": (24, 0.5),
    "dictionary entries": (60, 0.9),
    "manual pages": (900, 1.1),
    "books": (120_000, 0.6),
}
ROWS = (2048, 8192, 32_768, 131_072, 1_048_576)
HEADERS = 2048
"""Bytes of tar that each document had: two headers, and what fills their contents to whole blocks."""


def write_corpus(folder: Path, middle: int, spread: float, tokens: int) -> None:
    """Write a corpus of documents of random ids with log-normal lengths."""
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.lognormal(np.log(middle), spread, 3 * tokens // middle)).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    with ShardWriter(folder, tokenizer_hash="t", token_dtype="uint16") as writer:
        for number, length in enumerate(lengths.tolist()):
            ids = draw.integers(0, 30_000, length, dtype=np.uint16)
            writer.add(f"{number:09d}", ids, f"corpus.jsonl#{number}", 4 * length)
        writer.finish({})


def compute_old_padding(lengths: NDArray[np.int64], row: int) -> tuple[float, float]:
    """Return the padding of cut rows and of complete sequences if rows don't span blocks of 256 KiB of tar."""
    ends = np.cumsum(2 * lengths + HEADERS) // 2**18
    blocks = np.split(lengths, np.flatnonzero(np.diff(ends)) + 1)
    cut = sum(-(-int(block.sum()) // row) for block in blocks)
    whole_rows = 0
    for block in blocks:
        counts = np.maximum(-(-block // row), 1)
        remainder = block - (counts - 1) * row
        whole_rows += int((counts - 1).sum()) + int(best_fit_decreasing(remainder[:, None], (row,)).max()) + 1
    total = int(lengths.sum())
    return 1 - total / (cut * row), 1 - total / (whole_rows * row)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--longest", type=int, default=ROWS[-1])
    args = parser.parse_args()
    print("| Documents | Row | Cut, before | Cut | Whole, before | Whole | Bytes on disk a token |")
    print("|---|---|---|---|---|---|---|")
    for kind, (middle, spread) in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            write_corpus(Path(place) / "corpus", middle, spread, args.tokens)
            corpus = Corpus.open(Path(place) / "corpus")
            lengths = corpus.lengths() + 1
            disk = sum(shard.bytes for shard in corpus.manifest.shards) / corpus.n_tokens
            for row in (size for size in ROWS if size <= args.longest):
                was, now = compute_old_padding(lengths, row), measure_padding(lengths, corpus.blocks, row)
                figures = [f"{100 * share:.2f} %" for pair in zip(was, now, strict=True) for share in pair]
                print(f"| {kind} | {row:,} | {' | '.join(figures)} | {disk:.2f} |", flush=True)


if __name__ == "__main__":
    main()
