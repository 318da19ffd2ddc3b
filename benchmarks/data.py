"""Speed of reading training data, against raw zstd, mmap and the webdataset library, on real text.

    python benchmarks/data.py --corpus FOLDER --places TEXTS --out benchmarks/results

The corpus is made in `--corpus` at the first run, which takes minutes, and taken from there later: texts of this
machine (see `texts.py`) and of `--places` (Debian's linux-source, unpacked, has 1.3 GB), each once, tokenized by a
SentencePiece model that is trained on a part of it, the same samples for every contender. The contenders take turns in
a random order within each round; everything is shuffled but for the raw ones. Raw ones, samples and rows of megatfm are
of the whole corpus; the webdataset library, which is slower, reads the first shards of it, whole, so that nothing it
has read ahead is left uncounted. "With opening" opens the corpus each time: manifest, indexes and their checks. Rows
are packed: int64 tokens, targets, documents and positions. Rounds end after `--seconds`, but there are five.
"""

import argparse
import io
import json
import mmap
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import common
import numpy as np
import sentencepiece
import webdataset as wds
import zstandard
from texts import iter_texts

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.shard_index import ShardIndex
from megatfm.corpus.webdataset_index import index_folder
from megatfm.corpus.writer import ShardWriter
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader
from megatfm.data.sequences import PackingConfig
from megatfm.data.shuffled_documents import ShuffledDocuments
from megatfm.objectives.base import SpecialTokens
from megatfm.objectives.causal import Causal

VOCABULARY = 8000
LENGTH, BATCH = 2048, 32
LEAST_ROUNDS = 5
N_SLOW_SHARDS = 2
"""Shards of 64 MB that the webdataset library reads."""
SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=VOCABULARY)
RAW, MAPPED, BY_SAMPLE = "raw zstd", "mmap, 256 KB at a time", "mmap, a sample at a time"

Speeds = dict[str, tuple[float, float]]
"""Contender → tokens a second, and tokens a CPU second."""


class Contender(NamedTuple):
    """A function that returns how many tokens it read, and the name of what its speed is compared with."""

    run: Callable[[], int]
    against: str


def make_contenders(folder: Path) -> dict[str, Contender]:
    corpus, plain = Corpus.open(folder / "ours"), Corpus.open(folder / "tars")
    tars = sorted(str(path) for path in (folder / "tars").glob("*.tar"))
    objective, seeds = Causal(SPECIAL), iter(range(10**9))
    spans = list(map(find_sample_spans, plain.indexes))

    def read_raw() -> int:
        unpack = zstandard.ZstdDecompressor()
        for block in range(corpus.n_blocks):
            unpack.decompress(corpus.read_frame(block))
        return corpus.n_tokens

    def read_mapped(by_sample: bool) -> int:
        for path, samples in zip(tars, spans, strict=True):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                pieces = ((at, at + 2**18) for at in range(0, len(data), 2**18))
                for start, end in samples if by_sample else pieces:
                    _ = data[start:end]
        return plain.n_tokens

    def read_samples(of: Corpus) -> int:
        documents = ShuffledDocuments(of, seed=next(seeds))
        return sum(len(next(documents)[1]) for _ in range(of.n_samples))

    def read_rows(of: Corpus) -> int:
        packed = PackedDataset(of, PackingConfig(objective, (LENGTH,), next(seeds)))
        with DataLoader(packed, global_batch=BATCH, micro_batch=BATCH, end_position=len(packed)) as loader:
            for _ in loader:
                pass
        return of.n_tokens

    def iter_webdataset() -> Iterator[np.ndarray]:
        data = wds.WebDataset(tars[:N_SLOW_SHARDS], shardshuffle=N_SLOW_SHARDS, seed=next(seeds), empty_check=False)
        return (sample["tokens.npy"] for sample in data.shuffle(1000).decode())

    return {
        RAW: Contender(read_raw, RAW),
        "megatfm samples, zstd": Contender(lambda: read_samples(corpus), RAW),
        "megatfm samples, zstd, with opening": Contender(lambda: read_samples(Corpus.open(folder / "ours")), RAW),
        MAPPED: Contender(lambda: read_mapped(False), BY_SAMPLE),
        BY_SAMPLE: Contender(lambda: read_mapped(True), BY_SAMPLE),
        "megatfm samples, tar, first epoch": Contender(lambda: read_samples(Corpus.open(folder / "tars")), BY_SAMPLE),
        "megatfm samples, tar, later": Contender(lambda: read_samples(plain), BY_SAMPLE),
        "webdataset samples, tar": Contender(lambda: sum(map(len, iter_webdataset())), BY_SAMPLE),
        f"megatfm rows of {LENGTH}, zstd": Contender(lambda: read_rows(corpus), RAW),
        f"megatfm rows of {LENGTH}, zstd, with opening": Contender(
            lambda: read_rows(Corpus.open(folder / "ours")), RAW
        ),
        f"webdataset rows of {LENGTH}, tar": Contender(lambda: pack_as_usual(iter_webdataset()), RAW),
    }


def find_sample_spans(index: ShardIndex) -> list[tuple[int, int]]:
    """Return start and end of each sample's tokens in a plain tar."""
    starts = index.samples["offset"] + np.repeat(index.offsets[:-1], index.frames["samples"])
    return list(zip(starts.tolist(), (starts + 2 * index.samples["tokens"].astype(np.int64)).tolist(), strict=True))


def pack_as_usual(documents: Iterator[np.ndarray]) -> int:
    """Pack documents into rows like megatfm's, with a buffer as for other loaders; return the number of tokens."""
    fields, read, batch = [np.zeros(0, np.int64)] * 4, 0, []
    for number, ids in enumerate(documents):
        framed = np.concatenate([[SPECIAL.bos], ids, [SPECIAL.eos]]).astype(np.int64)
        n = len(framed) - 1
        new = framed[:-1], framed[1:], np.full(n, number), np.arange(n)
        fields = [np.concatenate(pair) for pair in zip(fields, new, strict=True)]
        full = len(fields[0]) // LENGTH * LENGTH
        for start in range(0, full, LENGTH):
            tokens, targets, documents_, positions = (field[start : start + LENGTH] for field in fields)
            documents_ = documents_ - documents_[0]
            positions = np.where(documents_ == 0, positions - positions[0], positions)
            batch.append((tokens, targets, documents_, positions))
            if len(batch) == BATCH:
                stacked = [np.stack(field) for field in zip(*batch, strict=True)]
                read += stacked[0].size
                batch = []
        fields = [field[full:] for field in fields]
    return read


def measure_wait(folder: Path, step_seconds: float = 0.05, steps: int = 40) -> float:
    """Return the seconds a step that a trainer waits for its rows if its step takes `step_seconds`."""
    packed = PackedDataset(Corpus.open(folder / "ours"), PackingConfig(Causal(SPECIAL), (LENGTH,), seed=0))
    with DataLoader(packed, global_batch=BATCH, micro_batch=BATCH) as loader:
        next(loader)
        before = loader.wait_seconds
        for _ in range(steps):
            time.sleep(step_seconds)
            next(loader)
        return (loader.wait_seconds - before) / steps


def measure(runs: dict[str, Contender], most: int, seconds: float) -> list[Speeds]:
    rounds, begin = list[Speeds](), time.perf_counter()
    for number in range(most + 1):
        speeds = {}
        for name in common.shuffle_order(runs, number):
            start, start_cpu = time.perf_counter(), time.process_time()
            tokens = runs[name].run()
            speeds[name] = tokens / (time.perf_counter() - start), tokens / (time.process_time() - start_cpu)
        if number:  # the first round fills the page cache
            rounds.append(speeds)
        spent = time.perf_counter() - begin
        print(f"round {number}: {spent:.0f} s", file=sys.stderr, flush=True)
        if len(rounds) >= LEAST_ROUNDS and spent * (number + 2) / (number + 1) > seconds:
            break
    return rounds


def write_page(path: Path | None, folder: Path, runs: dict[str, Contender], rounds: list[Speeds]) -> None:
    facts = json.loads((folder / "facts.json").read_text())
    disk = sum(shard.bytes for shard in Corpus.open(folder / "ours").manifest.shards)
    page = common.Page(
        path,
        "Reading training data",
        f"{facts['documents']:,} documents, {facts['bytes']:,} bytes of text, {facts['tokens']:,} tokens; {disk:,} "
        f"bytes on disk as zstd frames, made in {facts['seconds']:.0f} s.",
        f"`python benchmarks/data.py`; {common.get_cpu_name()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, NumPy {np.__version__}, webdataset {wds.__version__}. Medians of {len(rounds)} "
        f"interleaved rounds. webdataset reads {N_SLOW_SHARDS} of the shards of 64 MB, the others all.",
        table="| | M tokens/s | M tokens/CPU s | speed against | in parts of it |",
    )
    for name, (_, against) in runs.items():
        wall, processor = (statistics.median(speeds[name][i] for speeds in rounds) for i in (0, 1))
        share = statistics.median(speeds[name][0] / speeds[against][0] for speeds in rounds)
        page.add(f"| {name} | {wall / 1e6:.1f} | {processor / 1e6:.1f} | {against} | {share:.2f} |")
    waited = 1e3 * measure_wait(folder)
    page.add("", f"A trainer whose step of {BATCH} rows takes 50 ms waits {waited:.2f} ms a step for its data.")


def tokenize(documents: list[str]) -> Iterator[np.ndarray]:
    model, sample = io.BytesIO(), random.Random(0).sample(documents, min(len(documents), 300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample for line in text.splitlines()[:400] if len(line) < 2000),
        model_writer=model, vocab_size=VOCABULARY, model_type="bpe", byte_fallback=True, minloglevel=2,
        num_threads=os.cpu_count(),
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for start in range(0, len(documents), 512):
        for ids in processor.encode(documents[start : start + 512], num_threads=os.cpu_count()):
            yield np.array(ids, np.uint16)


def write_corpora(folder: Path, megabytes: float, places: list[str]) -> None:
    """Write the same samples for every contender, and their numbers into facts.json."""
    folder.mkdir(parents=True, exist_ok=True)
    start, documents = time.perf_counter(), list(iter_texts(int(megabytes * 1e6), places))
    random.Random(0).shuffle(documents)
    size, tokens = sum(len(text.encode()) for text in documents), 0
    (folder / "tars").mkdir()
    with (
        ShardWriter(folder / "ours", tokenizer_hash="t", token_dtype="uint16", shard_bytes=2**26) as writer,
        wds.ShardWriter(str(folder / "tars/%06d.tar"), maxsize=2**26, maxcount=10**9, verbose=0) as tars,
    ):
        for i, ids in enumerate(tokenize(documents)):
            tokens += len(ids)
            writer.add(f"{i:09d}", ids, "text", len(documents[i].encode()))
            tars.write({"__key__": f"{i:09d}", "tokens.npy": ids})
        writer.finish({})
    index_folder(folder / "tars", "t")  # for `.tar` without compression
    seconds = time.perf_counter() - start
    facts = {"documents": len(documents), "bytes": size, "tokens": tokens, "seconds": seconds}
    common.write_json(folder / "facts.json", facts)


@common.argument("--corpus", required=True, metavar="FOLDER")
@common.argument("--places", nargs="*", default=[], metavar="FOLDER", help="more folders of text")
@common.argument("--megabytes", type=float, default=1100, help="of text, at most")
@common.argument("--rounds", type=int, default=10, help="at most")
@common.argument("--seconds", type=float, default=400, help="after which no round begins, but for five")
@common.argument("--out", type=common.make_output_folder, metavar="FOLDER", help="for DATE-data.md")
def main(args: argparse.Namespace) -> None:
    folder = Path(args.corpus)
    if not (folder / "facts.json").exists():
        write_corpora(folder, args.megabytes, args.places)
    runs = make_contenders(folder)
    rounds = measure(runs, args.rounds, args.seconds)
    write_page(common.make_dated_path(args.out, "data.md"), folder, runs, rounds)


if __name__ == "__main__":
    common.run_script(__doc__, main)
