"""Rows planned of a corpus: their padding, the speed of each objective, and memory by number of documents.

    python benchmarks/packing.py padding [--tokens 20_000_000] [--longest 131_072]
    python benchmarks/packing.py objectives --out benchmarks/results
    python benchmarks/packing.py memory [--documents 1_000_000] [--ranks 8]

padding: its share by the lengths of documents and of rows, counted, so no clock matters. Corpora of documents as long
as short sayings, dictionary entries, manual pages and books are written as shards, and rows planned of them: cut at
row ends, and with whole sequences.

objectives: speed of making, planning and packing sequences, and how full rows are. Documents of random tokens with
log-normal lengths (median 403, as long as 60,000), in blocks of 160, so about as large as a corpus's; rows of 512
tokens, of 512 and 128 for encoder-decoders, the first ones in stored order. CPU time of one thread, best of three;
"packed" counts what is in the rows, by the time in which they are read.

memory: the peak of a fresh process beyond its imports, and time, after opening a corpus and after planning. Only
indexes are real: shards are empty space on disk, and all share one index. With --ranks: the memory of that many
processes together (the sum of their proportional set sizes, in which a page that several map counts once) when each
has opened the corpus and looked up the documents of blocks that lie anywhere in it; with indexes of their own, and
with shared ones.
"""

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import common
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.config import Config, ModelConfig, load_config
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.manifest import CorpusShard, IndexFile, Manifest
from megatfm.corpus.shard_index import FRAME_DTYPE, ShardIndex, make_sample_dtype
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.corpus.writer import ShardWriter
from megatfm.data.bin_packing import measure_padding
from megatfm.data.dataset import PackedDataset
from megatfm.data.packing_plan import build_packing_plan
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey

# -------------------------------------------------------------------------------------------------- padding

KINDS = {"sayings": (24, 0.5), "dictionary entries": (60, 0.9), "manual pages": (900, 1.1), "books": (120_000, 0.6)}
"""Documents → their middle length, and how far lengths spread (of the logarithm)."""
ROW_LENGTHS = (2048, 8192, 32_768, 131_072, 1_048_576)


def write_documents(folder: Path, middle: int, spread: float, tokens: int) -> None:
    """Write a corpus of documents, at least one, of random ids with log-normal lengths."""
    draw = np.random.default_rng(0)
    count = max(1, 3 * tokens // middle)
    lengths = np.maximum(1, draw.lognormal(np.log(middle), spread, count)).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    with ShardWriter(folder, tokenizer_hash="t", token_dtype="uint16") as writer:
        for number, length in enumerate(lengths.tolist()):
            ids = draw.integers(0, 30_000, length, dtype=np.uint16)
            writer.add(f"{number:09d}", ids, f"corpus.jsonl#{number}", 4 * length)
        writer.finish({})


@common.argument("--tokens", type=int, default=20_000_000)
@common.argument("--longest", type=int, default=ROW_LENGTHS[-1])
def run_padding(args: argparse.Namespace) -> None:
    page = common.Page(None, "Padding of rows", table="| Documents | Row | Cut | Whole | Bytes on disk a token |")
    for kind, (middle, spread) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_documents(Path(folder, "corpus"), middle, spread, args.tokens)
            corpus = Corpus.open(Path(folder, "corpus"))
            lengths = corpus.lengths() + 1
            disk = sum(shard.bytes for shard in corpus.manifest.shards) / corpus.n_tokens
            for row in (size for size in ROW_LENGTHS if size <= args.longest):
                cut_padding, sequence_padding = measure_padding(lengths, corpus.blocks, row)
                shares = f"{100 * cut_padding:.2f} % | {100 * sequence_padding:.2f} %"
                page.add(f"| {kind} | {row:,} | {shares} | {disk:.2f} |")


# ----------------------------------------------------------------------------------------------- objectives

VOCABULARY, DRAWN, PER_BLOCK, BUILT = 32_128, 3_200, 160, 500
SPECIAL = SpecialTokens(
    bos=1, eos=2, pad=0, vocab_size=VOCABULARY, mask=3, cls=4, sep=5,
    sentinels=range(VOCABULARY - 1, VOCABULARY - 129, -1),
    word_starts=np.random.default_rng(1).random(VOCABULARY) < 0.6,
)  # fmt: skip
FAMILIES = {
    "causal": ("decoder", "encoder_decoder"), "prefix": ("decoder", "encoder_decoder"), "masked": ("encoder",),
    "next_sentence": ("encoder",), "sentence_order": ("encoder",), "span_boundary": ("encoder",),
    "span_corruption": ("encoder_decoder", "decoder"), "ul2": ("encoder_decoder", "decoder"),
    "replaced_token": ("electra",),
}  # fmt: skip


class CorpusStub:
    """A corpus in memory that repeats the same documents."""

    folder = fingerprint = "random"

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        drawn = np.minimum(random.lognormal(6, 1.2, DRAWN).astype(np.int64) + 1, 60_000)
        self._lengths = np.resize(drawn, count)
        self.n_samples, self.blocks = count, np.arange(0, count + 1, PER_BLOCK)
        self._documents = [random.integers(200, 30_000, n).astype(np.uint16) for n in drawn]

    def lengths(self, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        return self._lengths[self.blocks[begin] : self.blocks[-1 if end is None else end]]

    def read_block(self, number: int) -> list[tuple[int, NDArray[np.uint16]]]:
        return [(i, self._documents[i % DRAWN]) for i in range(*self.blocks[number : number + 2])]


class Partners:
    def __init__(self, documents: list[NDArray[np.uint16]]) -> None:
        self.documents, self.lengths = documents, np.array([len(document) for document in documents])

    def tokens(self, number: int) -> NDArray[np.uint16]:
        return self.documents[number]


def make_objective(name: str, family: str, rows: tuple[int, ...]) -> Objective:
    values = load_config("quickstart").model_dump() | {"objective": {"name": name}}
    sizes: dict[str, Any] = {"d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8}
    if family == "encoder":
        sizes |= {"extra_heads.sentence.classes": 2, "extra_heads.boundary.name": "boundary", "embedding.n_segments": 2}
    elif family == "electra":
        sizes["generator"] = {"d_model": 8, "n_heads": 1, "d_ff": 8}
    model = ModelConfig.from_dotted(family=family, **sizes)
    return build_objective(Config.model_validate(values).objective, model, SPECIAL, rows)


def time_best_of_three(run: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of three calls."""
    return min(common.time_call(run, time.process_time) for _ in range(3))


def measure_row(corpus: CorpusStub, name: str, family: str, n_rows: int) -> str:
    rows = (512, 128) if family == "encoder_decoder" else (512,)
    task = make_objective(name, family, rows)
    n, documents = min(task.max_tokens or 512, 512), [tokens for _, tokens in corpus.read_block(0)]
    text, partners = np.resize(documents[0], n), Partners(documents)
    packing_config = PackingConfig(task, (rows[0], rows[-1])[: len(task.field_prefixes)], seed=0)

    def build() -> None:
        for sample in range(BUILT):
            task.build_example(DocumentChunk(text, partners), ChunkKey(0, 0, sample, 0))

    def plan() -> PackedDataset:
        return PackedDataset(corpus, packing_config, shuffle=False)  # type: ignore[arg-type]

    planning = time_best_of_three(plan)
    sequences = sum(-(-corpus.lengths() // task.max_tokens)) if task.max_tokens else corpus.n_samples
    read = plan().read_rows(range(n_rows))
    real = [read[f"{side}documents"] >= 0 for side in task.field_prefixes]
    packing = sum(map(np.sum, real)) / (time_best_of_three(lambda: plan().read_rows(range(n_rows))) - planning)
    return (
        f"| {name} | {family} | {BUILT * n / time_best_of_three(build) / 1e6:.1f} | {packing / 1e6:.1f} | "
        f"{planning / sequences * 1e6:.1f} | {', '.join(f'{100 * np.mean(side):.1f} %' for side in real)} |"
    )


@common.argument("--documents", type=int, default=64_000)
@common.argument("--rows", type=int, default=1024)
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-objectives.md")
def run_objectives(args: argparse.Namespace) -> None:
    corpus = CorpusStub(args.documents)
    page = common.Page(
        common.make_dated_path(args.out, "objectives.md"),
        "Objectives",
        f"`python benchmarks/packing.py objectives`, {common.get_cpu_name(instructions=True)}, NumPy {np.__version__}, "
        f"{args.documents:,} documents, {args.rows:,} rows.",
        table="| Objective | Family | build, M tokens/s | packed, M tokens/s | plan, µs a sequence | filled, by side |",
    )
    for name, families in FAMILIES.items():
        for family in families:
            page.add(measure_row(corpus, name, family, args.rows))


# --------------------------------------------------------------------------------------------------- memory

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
        index = IndexFile(file=f"{name}.index.zst", bytes=len(data), blake3=blake3(data).hexdigest())
        digest, n_tokens = blake3(name.encode()).hexdigest(), int(tokens.sum())
        sizes: dict[str, Any] = {"samples": SHARD_DOCUMENTS, "tokens": n_tokens, "text_bytes": 4 * n_tokens}
        shards.append(CorpusShard(file=f"{name}.tar.zst", bytes=size, blake3=digest, **sizes, index=index))
    Manifest(token_dtype="uint16", tokenizer_hash="t", shards=tuple(shards), provenance={}).save(folder)


def measure_memory(folder: Path) -> str:
    """Open and plan; return a row of the table."""
    before, start = common.read_memory("VmHWM"), time.perf_counter()
    corpus = Corpus.open(folder)
    cells = [
        f"{corpus.n_samples:,}",
        f"{(common.read_memory('VmHWM') - before) / 1e6:,.0f} MB",
        f"{time.perf_counter() - start:.1f} s",
    ]
    for max_tokens in (None, 2047):
        start = time.perf_counter()
        build_packing_plan(corpus, ObjectiveStub(max_tokens), [2048], 0)
        cells += [f"{(common.read_memory('VmHWM') - before) / 1e6:,.0f} MB", f"{time.perf_counter() - start:.1f} s"]
    return f"| {' | '.join(cells)} |"


def run_rank(rank: int, folder: Path, cache: Path | None, lookups: int, barrier: Any, answers: Any) -> None:
    """Open the corpus and look up blocks; put the bytes held (Pss), and the seconds of both, when all are as far."""
    before = common.read_memory("Pss", "smaps_rollup")
    barrier.wait()
    start = time.perf_counter()
    corpus = Corpus.open(folder, ShardCacheConfig(cache) if cache else None)
    opened = time.perf_counter() - start
    barrier.wait()
    gc.collect()
    at_opening = common.read_memory("Pss", "smaps_rollup") - before
    start = time.perf_counter()
    for block in np.random.default_rng(rank).integers(0, corpus.n_blocks, lookups).tolist():
        corpus.lengths(block, block + 1)
    looked_up = time.perf_counter() - start
    gc.collect()
    barrier.wait()
    answers.put((at_opening, common.read_memory("Pss", "smaps_rollup") - before, opened, looked_up / lookups))
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
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place) / "corpus", Path(place) / "cache"
        folder.mkdir()
        write_corpus(folder, documents)
        table = f"| {documents:,} documents, {ranks} ranks | Opened | | and blocks looked up | a block |"
        page = common.Page(None, "Indexes of ranks", table=table)
        page.add(f"| own indexes | {measure_ranks(folder, ranks, None, 300)} |")
        for title in ("shared, first start", "shared, later starts"):
            page.add(f"| {title} | {measure_ranks(folder, ranks, cache, 20_000)} |")


@common.argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
@common.argument("--ranks", type=int, help="measure the memory of this many processes together")
def run_memory(args: argparse.Namespace) -> None:
    if args.ranks:
        for documents in args.documents:
            print_ranks(documents, args.ranks)
        return
    table = "| Documents | Opened | | and cut rows planned | | and whole sequences | |"
    page = common.Page(None, "Memory of opening and planning a corpus", table=table)
    for documents in args.documents:
        with tempfile.TemporaryDirectory() as place:
            write_corpus(Path(place), documents)
            page.add(common.call_in_new_process(measure_memory, Path(place)))


PARTS = {"padding": run_padding, "objectives": run_objectives, "memory": run_memory}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
