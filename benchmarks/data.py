"""How fast training data is read, against raw zstd, mmap, the webdataset library and MosaicML Streaming, on real text.

    python benchmarks/data.py --corpus FOLDER --places TEXTS --out benchmarks/results

The text is what this machine's manuals, documentation and Python sources hold, and `--places` besides (Debian's
linux-source, unpacked, has 1.3 GB), each file once (deduplicated by hash), tokenized by a SentencePiece model that is
trained on a part of it. The corpus is made in `--corpus` at the first run and taken from there later. Every contender
reads the same documents, shuffled but for the raw ones; they take turns in a random order within each round. Rows are
packed: int64 tokens, targets, documents and positions. `--mosaic FOLDER` is where
`pip install --target FOLDER --no-deps mosaicml-streaming Brotli zstd python-snappy cramjam catalogue xxhash pillow` put
that library, which asks for an older NumPy than megatfm's; it runs in three of the rounds only.
"""

import argparse
import gzip
import importlib.machinery
import io
import json
import mmap
import os
import platform
import random
import statistics
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import webdataset as wds
import zstandard
from blake3 import blake3

from megatfm.data import Corpus, Loader, PackedRows, ShardWriter, ShuffledSamples, index_folder
from megatfm.objectives.causal import Causal
from megatfm.objectives.registry import SpecialTokens

PLACES = ("/usr/share/doc", "/usr/share/man", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
KINDS = {
    ".py",
    ".pyi",
    ".h",
    ".hpp",
    ".cuh",
    ".md",
    ".rst",
    ".txt",
    ".html",
    ".c",
    ".cpp",
    ".js",
    ".css",
    ".toml",
    "",
}
VOCABULARY, LENGTH, BATCH = 8000, 2048, 32
ROWS_PART = 4  # rows are the slowest to make: a quarter of an epoch is enough of them
SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=VOCABULARY)


def texts(most: int, places: list[str]) -> Iterator[str]:
    """Up to `most` bytes of text files, each text once."""
    seen, total = set[bytes](), 0
    for place in (*PLACES, *places):
        for folder, folders, names in os.walk(place):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                plain = name.removesuffix(".gz")
                is_manual = folder.startswith("/usr/share/man")
                if not (is_manual or Path(plain).suffix in KINDS) or path.is_symlink() or not path.is_file():
                    continue
                data = path.read_bytes()
                try:
                    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
                except (UnicodeDecodeError, OSError, EOFError):
                    continue
                digest = blake3(text.encode()).digest()
                if digest in seen or not text.strip():  # no tokens, which Streaming does not take
                    continue
                seen.add(digest)
                total += len(text.encode())
                yield text
                if total >= most:
                    return


def tokenize(documents: list[str]) -> Iterator[np.ndarray]:
    """uint16 tokens of each document."""
    model, sample = io.BytesIO(), random.Random(0).sample(documents, min(len(documents), 300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample for line in text.splitlines()[:400] if len(line) < 2000),
        model_writer=model,
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        num_threads=os.cpu_count(),
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for start in range(0, len(documents), 512):
        for ids in processor.encode(documents[start : start + 512], num_threads=os.cpu_count()):
            yield np.array(ids, np.uint16)


def write(folder: Path, megabytes: float, places: list[str], mosaic: bool) -> None:
    """The same samples for every contender, and their numbers in facts.json."""
    folder.mkdir(parents=True, exist_ok=True)
    start, documents = time.perf_counter(), list(texts(int(megabytes * 1e6), places))
    random.Random(0).shuffle(documents)
    size, tokens = sum(len(text.encode()) for text in documents), 0
    (folder / "tars").mkdir()
    with (
        ShardWriter(folder / "ours", tokenizer_hash="t", token_dtype="uint16", shard_bytes=2**26) as ours,
        wds.ShardWriter(str(folder / "tars/%06d.tar"), maxsize=2**26, maxcount=10**9, verbose=0) as tars,
    ):
        theirs = None
        if mosaic:
            from streaming import MDSWriter

            theirs = MDSWriter(
                out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}, size_limit=2**26
            )
        for i, ids in enumerate(tokenize(documents)):
            tokens += len(ids)
            ours.add(f"{i:09d}", ids, "text", len(documents[i].encode()))
            tars.write({"__key__": f"{i:09d}", "tokens.npy": ids})
            if theirs is not None:
                theirs.write({"tokens": ids})
        ours.finish({})
        if theirs is not None:
            theirs.finish()
    index_folder(folder / "tars", "t")  # for `.tar` without compression
    facts = {
        "documents": len(documents),
        "bytes": size,
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def contenders(folder: Path, mosaic: bool) -> dict[str, Callable[[], int]]:
    """Each reads samples, and returns how many tokens there were."""
    corpus, plain = Corpus.open(folder / "ours"), Corpus.open(folder / "tars")
    tars = sorted(str(path) for path in (folder / "tars").glob("*.tar"))
    objective, seeds = Causal(SPECIAL), iter(range(10**9))
    part = corpus.n_tokens // ROWS_PART

    def raw() -> int:
        unpack = zstandard.ZstdDecompressor()
        for block in range(corpus.n_blocks):
            unpack.decompress(corpus.frame_bytes(block))
        return corpus.n_tokens

    def mapped() -> int:
        for path in tars:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for start in range(0, len(data), 2**18):
                    _ = data[start : start + 2**18]
        return plain.n_tokens

    def samples(of: Corpus) -> int:
        found = ShuffledSamples(of, seed=next(seeds))
        return sum(len(next(found)[1]) for _ in range(of.n_samples))

    def rows() -> int:
        packed = PackedRows(corpus, objective, sequence_length=LENGTH, seed=next(seeds))
        with Loader(packed, global_batch=BATCH, micro_batch=BATCH, stop=part // LENGTH) as loader:
            return sum(batch["tokens"].size for step in loader for batch in step)

    def webdataset() -> Iterator[np.ndarray]:
        data = wds.WebDataset(tars, shardshuffle=len(tars), seed=next(seeds), empty_check=False)
        return (sample["tokens.npy"] for sample in data.shuffle(1000).decode())

    def streaming() -> int:
        from streaming import StreamingDataset

        data = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=1, shuffle_seed=next(seeds)
        )
        return sum(len(sample["tokens"]) for sample in data)

    found = {
        "raw zstd": raw,
        "megatfm samples, zstd": lambda: samples(corpus),
        "mmap": mapped,
        "megatfm samples, tar": lambda: samples(plain),
        "webdataset samples": lambda: sum(map(len, webdataset())),
        f"megatfm rows of {LENGTH}": rows,
        f"webdataset rows of {LENGTH}": lambda: packed_as_usual(webdataset(), part),
    }
    return found | ({"MosaicML Streaming samples": streaming} if mosaic else {})


def packed_as_usual(documents: Iterator[np.ndarray], most: int) -> int:
    """The rows that megatfm makes, as one writes it for other loaders: a buffer to which documents are added."""
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
                read += sum(
                    field.size for field in [np.stack(field) for field in zip(*batch, strict=True)][:1]
                )
                batch = []
        fields = [field[full:] for field in fields]
        if read >= most:
            break
    return read


def wait_per_step(folder: Path, step_seconds: float = 0.05, steps: int = 40) -> float:
    """Seconds a step that a trainer waits for its rows, after the first, if it is busy elsewhere for so long."""
    packed = PackedRows(Corpus.open(folder / "ours"), Causal(SPECIAL), sequence_length=LENGTH, seed=0)
    with Loader(packed, global_batch=BATCH, micro_batch=BATCH) as loader:
        next(loader)
        before = loader.waited
        for _ in range(steps):
            time.sleep(step_seconds)
            next(loader)
        return (loader.waited - before) / steps


def with_mosaic(folder: str) -> None:
    """Let `import streaming` find the library; what it imports of torchvision, it needs for images only."""
    sys.path.append(folder)
    names = (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    )
    for name in names:
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.VisionDataset, module.to_tensor = object, None
        sys.modules[name] = module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True, metavar="FOLDER")
    parser.add_argument("--places", nargs="*", default=[], metavar="FOLDER", help="more folders of text")
    parser.add_argument("--megabytes", type=float, default=1100, help="of text, at most")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mosaic", metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for DATE-data.md")
    options = parser.parse_args()
    if options.mosaic:
        with_mosaic(options.mosaic)
    folder = Path(options.corpus)
    if not (folder / "facts.json").exists():
        write(folder, options.megabytes, options.places, bool(options.mosaic))
    runs = contenders(folder, bool(options.mosaic))
    speed: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    share: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        found = {}
        for name in random.Random(number).sample(list(runs), len(runs)):
            if "MosaicML" in name and number > 3:
                continue
            start, start_cpu = time.perf_counter(), time.process_time()
            tokens = runs[name]()
            found[name] = tokens / (time.perf_counter() - start), tokens / (time.process_time() - start_cpu)
        if not number:  # the first round fills the page cache
            continue
        for name, (wall, processor) in found.items():
            speed[name].append(wall)
            cpu[name].append(processor)
            share[name].append(wall / found["mmap" if name.endswith("tar") else "raw zstd"][0])
    report = table(folder, speed, cpu, share)
    print(report)
    if options.out:
        (options.out / f"{time.strftime('%Y-%m-%d')}-data.md").write_text(report)


def table(folder: Path, *measured: dict[str, list[float]]) -> str:
    """The result, as a page."""
    facts = json.loads((folder / "facts.json").read_text())
    disk = sum(shard.bytes for shard in Corpus.open(folder / "ours").manifest.shards)
    lines = [
        f"# Reading training data, {time.strftime('%Y-%m-%d')}",
        "",
        f"{facts['documents']:,} documents, {facts['bytes']:,} bytes of text, {facts['tokens']:,} tokens; {disk:,} "
        f"bytes on disk as zstd frames, made in {facts['seconds']:.0f} s.",
        f"`python benchmarks/data.py`; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, NumPy {np.__version__}, webdataset {wds.__version__}. Medians of rounds; the "
        "last column is against mmap for samples from `.tar`, against raw zstd for the rest.",
        "",
        "| | M tokens/s | M tokens/CPU s | rounds | speed of raw bytes |",
        "|---|---|---|---|---|",
    ]
    for name in measured[0]:
        wall, processor, share = (statistics.median(values[name]) for values in measured)
        rounds = len(measured[0][name])
        lines.append(f"| {name} | {wall / 1e6:.1f} | {processor / 1e6:.1f} | {rounds} | {share:.2f} |")
    waited = wait_per_step(folder)
    lines += [
        "",
        f"A trainer whose step of {BATCH} rows takes 50 ms waits {1e3 * waited:.2f} ms a step for its data.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
