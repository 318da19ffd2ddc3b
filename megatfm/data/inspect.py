"""Look into a corpus: verify every byte of it, or print what it holds."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus
from megatfm.data.groups import group_blocks
from megatfm.data.plan import MUCH_PADDING
from megatfm.data.whole import best_fit_decreasing
from megatfm.errors import MegatfmError

ROWS = (2048, 8192, 32_768, 131_072, 1_048_576)
TOKEN_SHARES, LARGEST = "holds", 6
PADDING_SAMPLE = 2**16
"""Documents of which padding is told."""


@dataclass(frozen=True)
class CheckReport:
    """What `check` has read and found whole; `bytes` are those of the shards."""

    shards: int
    blocks: int
    samples: int
    tokens: int
    text_bytes: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"whole: {self.shards:,} shards, {self.blocks:,} blocks, {self.samples:,} samples, "
            f"{self.tokens:,} tokens of {self.text_bytes:,} bytes of text, {self.bytes:,} bytes on disk"
        )


def check(folder: str | Path) -> CheckReport:
    """Re-read every sample and re-hash every file; a MegatfmError names the place of the first damage."""
    corpus = Corpus.open(folder)  # which checks sizes and the indexes' hashes
    samples = tokens = 0
    for number, shard in enumerate(corpus.manifest.shards):
        found, keys = blake3(), corpus.indexes.complete(number).samples["key"]
        names, counts = np.unique(keys, return_counts=True)
        if counts.max() > 1:
            twice = names[counts.argmax()].decode("ascii", "replace")
            raise MegatfmError(
                f"{corpus.store.path(shard)}: sample {twice!r} is there twice: {corpus.store.remedy}"
            )
        # Samples first: they tell where the damage is, the hash only that there is some.
        for block in corpus.shard_blocks(number):
            found.update(corpus.frame_bytes(block))
            for sample in corpus.read_block_samples(block):
                samples += 1
                tokens += len(sample.tokens)
        if found.hexdigest() != shard.blake3:
            raise MegatfmError(
                f"{corpus.store.path(shard)}: its BLAKE3 hash is not the manifest's: {corpus.store.remedy}"
            )
    return CheckReport(
        shards=len(corpus.manifest.shards),
        blocks=corpus.n_blocks,
        samples=samples,
        tokens=tokens,
        text_bytes=corpus.n_text_bytes,
        bytes=sum(shard.bytes for shard in corpus.manifest.shards),
    )


def show(
    folder: str | Path, sample: int | None = None, decode: Callable[[NDArray[Any]], str] | None = None
) -> str:
    """Printable facts about a corpus, or one sample: its origin and its text (its ids without `decode`)."""
    corpus = Corpus.open(folder)
    if sample is not None:
        return _show_sample(corpus, sample, decode)
    disk = sum(shard.bytes for shard in corpus.manifest.shards)
    facts = {
        "corpus": str(corpus.folder),
        "shards": f"{len(corpus.manifest.shards):,} ({disk:,} bytes, {corpus.n_blocks:,} blocks)",
        "samples": f"{corpus.n_samples:,}",
        "tokens": f"{corpus.n_tokens:,} ({corpus.manifest.token_dtype})",
        "text": f"{corpus.n_text_bytes:,} bytes ({corpus.n_text_bytes / max(corpus.n_tokens, 1):.3f} a token)",
        **_padding(corpus),
        **_holds(corpus.manifest.provenance),
        "tokenizer": corpus.tokenizer_hash,
        "fingerprint": corpus.fingerprint,
        "provenance": json.dumps(
            {name: said for name, said in corpus.manifest.provenance.items() if name != TOKEN_SHARES},
            ensure_ascii=False,
            sort_keys=True,
        ),
    }
    return _table(facts)


def padding(lengths: NDArray[np.int64], blocks: NDArray[np.int64], row: int) -> tuple[float, float]:
    """Which share of rows of `row` is padding: where documents are cut at row ends, and where they stay whole.

    lengths [D]: tokens of each document, and one more for its end; blocks [B + 1]: the first document of each block.
    """
    total = int(lengths.sum())
    counts = np.maximum(-(-lengths // row), 1)
    owners = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.minimum(lengths[owners] - numbers * row, row)[:, None]
    starts = np.concatenate([[0], np.cumsum(counts)])[blocks]

    def rows_of(begin: int, end: int) -> int:
        return int(best_fit_decreasing(pieces[starts[begin] : starts[end]], (row,)).max(initial=-1)) + 1

    volumes = np.concatenate([[0], np.cumsum(pieces)])[starts][:, None]
    rows = sum(each for _, each in group_blocks(volumes, (row,), rows_of, is_bin_packed=True))
    return 1 - total / (-(-total // row) * row), 1 - total / (rows * row)


def _padding(corpus: Corpus) -> dict[str, str]:
    """What rows of usual lengths would be filled with, of the first documents of a large corpus."""
    blocks = corpus.blocks[: max(2, int(corpus.blocks.searchsorted(PADDING_SAMPLE, "right")))]
    some, found = corpus.lengths(0, len(blocks) - 1) + 1, {}
    for row in (size for size in ROWS if size <= int(some.sum())):
        cut, whole = padding(some, blocks, row)
        much = ": documents don't fill such rows" if whole > MUCH_PADDING else ""
        found[f"rows of {row:,}"] = (
            f"{cut:.1%} padding where documents are cut, {whole:.1%} where whole{much}"
        )
    return found


def _holds(provenance: dict[str, Any]) -> dict[str, str]:
    """The largest domains, languages and values of fields, as prep has counted them: each one's part of all tokens."""
    found = {}
    for name, (total, rows) in provenance.get(TOKEN_SHARES, {}).items():
        shares = [f"{value} {tokens / max(1, total):.1%}" for value, _, _, tokens in rows[:LARGEST]]
        found[name] = ", ".join(shares) + (" and others" if len(rows) > LARGEST else "")
    return found


def _show_sample(corpus: Corpus, number: int, decode: Callable[[NDArray[Any]], str] | None) -> str:
    sample = corpus.read_sample(number)
    facts = {
        "sample": f"{number:,} of {corpus.n_samples:,}",
        "key": sample.key,
        "source": sample.source,
        "tokens": f"{len(sample.tokens):,} of {sample.text_bytes:,} bytes of text",
        **{f".{extension}": f"{len(data):,} bytes" for extension, data in sample.members.items()},
        **{name: json.dumps(value, ensure_ascii=False) for name, value in sample.metadata.items()},
    }
    text = decode(sample.tokens) if decode else " ".join(map(str, sample.tokens))
    return f"{_table(facts)}\n\n{text}"


def _table(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())
