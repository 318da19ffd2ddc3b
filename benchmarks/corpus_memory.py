"""Memory and time of opening a corpus and planning its rows, by documents: `python benchmarks/corpus_memory.py`.

Only indexes are real: shards are empty space on disk, and all share one index. The figures are the peak memory of a
fresh process beyond its imports, after opening the corpus and after planning. With `--ranks`: the memory of that many
processes together (the sum of their proportional set sizes, in which a page that several map counts once) when
each has opened the corpus and looked up the documents of blocks that lie anywhere in it; with indexes of their own, and
with shared ones.
"""

import argparse
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import common
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.manifest import CorpusShard, IndexFile, Manifest
from megatfm.corpus.shard_index import FRAME_DTYPE, ShardIndex, make_sample_dtype
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.data.packing_plan import build_packing_plan

SHARD_DOCUMENTS = 250_000
PER_FRAME = 250


class ObjectiveStub:
    """An objective whose sequences have a token more than the text: cut at row ends, or complete (`max_tokens`)."""

    field_prefixes = ("",)
    padding_values = MappingProxyType[str, int]({})
    fields = None
    needs_other_documents = needs_files = False

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: Any) -> NDArray[np.int64]:
        return n_tokens + 1

    def build_example(self, piece: Any, key: Any) -> Any:
        raise NotImplementedError


def write_corpus(folder: Path, documents: int) -> None:
    """Write a corpus of at least `documents` documents, of 500 tokens on average."""
    random = np.random.default_rng(0)
    tokens = np.minimum(random.lognormal(5.6, 1.1, SHARD_DOCUMENTS).astype(np.int64) + 1, 100_000)
    samples = np.zeros(SHARD_DOCUMENTS, make_sample_dtype(10))
    within = tokens.reshape(-1, PER_FRAME)
    samples["tokens"], samples["text_bytes"] = tokens, 4 * tokens
    samples["offset"] = (2048 + 2 * (np.cumsum(within, axis=1) - within)).reshape(-1)
    samples["key"] = [f"{number:010d}".encode() for number in range(SHARD_DOCUMENTS)]
    frames = np.zeros(len(within), FRAME_DTYPE)
    frames["uncompressed"], frames["samples"] = 4096 + 2 * within.sum(axis=1), PER_FRAME
    frames["compressed"] = frames["uncompressed"] // 2
    data = ShardIndex(frames, samples, has_packed_frames=True).encode()
    (folder / "index").write_bytes(data)
    size, shards = int(frames["compressed"].sum(dtype=np.int64)), []
    for number in range(-(-documents // SHARD_DOCUMENTS)):
        name = f"shard-{number:06d}"
        os.link(folder / "index", folder / f"{name}.index.zst")
        with open(folder / f"{name}.tar.zst", "wb") as file:
            file.truncate(size)
        shards.append(
            CorpusShard(
                file=f"{name}.tar.zst",
                bytes=size,
                blake3=blake3(name.encode()).hexdigest(),
                samples=SHARD_DOCUMENTS,
                tokens=int(tokens.sum()),
                text_bytes=int(4 * tokens.sum()),
                index=IndexFile(file=f"{name}.index.zst", bytes=len(data), blake3=blake3(data).hexdigest()),
            )
        )
    Manifest(token_dtype="uint16", tokenizer_hash="t", shards=tuple(shards), provenance={}).save(folder)


def read_peak_memory() -> int:
    """Return the most memory that this process has had, in bytes."""
    return common.read_memory("VmHWM")


def measure(folder: Path) -> None:
    """Open and plan, and print a row of the table."""
    before, start = read_peak_memory(), time.perf_counter()
    corpus = Corpus.open(folder)
    cells = [
        f"{corpus.n_samples:,}",
        f"{(read_peak_memory() - before) / 1e6:,.0f} MB",
        f"{time.perf_counter() - start:.1f} s",
    ]
    for max_tokens in (None, 2047):
        start = time.perf_counter()
        build_packing_plan(corpus, ObjectiveStub(max_tokens), [2048], 0)
        cells += [f"{(read_peak_memory() - before) / 1e6:,.0f} MB", f"{time.perf_counter() - start:.1f} s"]
    print(f"| {' | '.join(cells)} |", flush=True)


def read_held_memory() -> int:
    """Return the memory of this process in bytes; a page that n processes map counts as its n-th part (Pss)."""
    return common.read_memory("Pss", "smaps_rollup")


def run_rank(rank: int, folder: Path, cache: Path | None, lookups: int, barrier: Any, answers: Any) -> None:
    """Open the corpus and look up blocks; put the bytes held, and the seconds of both, when all ranks are as far."""
    before = read_held_memory()
    barrier.wait()
    start = time.perf_counter()
    corpus = Corpus.open(folder, ShardCacheConfig(cache) if cache else None)
    opened = time.perf_counter() - start
    barrier.wait()
    gc.collect()
    at_opening = read_held_memory() - before
    start = time.perf_counter()
    for block in np.random.default_rng(rank).integers(0, corpus.n_blocks, lookups).tolist():
        corpus.lengths(block, block + 1)
    looked_up = time.perf_counter() - start
    gc.collect()
    barrier.wait()
    answers.put((at_opening, read_held_memory() - before, opened, looked_up / lookups))
    barrier.wait()


def measure_ranks(folder: Path, ranks: int, cache: Path | None, lookups: int) -> str:
    """Return the cells of a row of the table for processes with their own or with shared indexes."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(ranks), context.Queue()
    arguments = (folder, cache, lookups, barrier, answers)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    at_opening, at_end, opened, looked_up = zip(*(answers.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    return (
        f"{sum(at_opening) / 1e6:,.0f} MB | {max(opened):.1f} s | {sum(at_end) / 1e6:,.0f} MB | "
        f"{1e3 * sum(looked_up) / ranks:.2f} ms"
    )


def print_ranks(documents: int, ranks: int) -> None:
    print(f"| {documents:,} documents, {ranks} ranks | Opened | | and blocks looked up | a block |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place) / "corpus", Path(place) / "cache"
        folder.mkdir()
        write_corpus(folder, documents)
        print(f"| own indexes | {measure_ranks(folder, ranks, None, 300)} |", flush=True)
        for title in ("shared, first start", "shared, later starts"):
            print(f"| {title} | {measure_ranks(folder, ranks, cache, 20_000)} |", flush=True)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--ranks", type=int, help="measure the memory of this many processes together")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    if args.ranks:
        for documents in args.documents:
            print_ranks(documents, args.ranks)
        return
    print("| Documents | Opened | | and cut rows planned | | and whole sequences | |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for documents in args.documents:
        with tempfile.TemporaryDirectory() as place:
            write_corpus(Path(place), documents)
            subprocess.run([sys.executable, __file__, "--measure", place], check=True)


if __name__ == "__main__":
    main()
