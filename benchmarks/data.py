"""How fast training data is read, against raw zstd, the webdataset library and MosaicML Streaming, on real text.

    python benchmarks/data.py --megabytes 1100 --rounds 10 > benchmarks/results/DATE-data.md

The text is what this machine's manuals, documentation and Python sources hold, each file once (deduplicated by hash),
tokenized by a SentencePiece model that is trained on a part of it. Every contender gives each sample once, shuffled,
from the same documents; they take turns in a random order within each round. `--mosaic FOLDER` is where
`pip install --target FOLDER --no-deps mosaicml-streaming Brotli zstd python-snappy cramjam catalogue xxhash pillow` put
that library, which asks for an older NumPy than megatfm's.
"""

import argparse
import gzip
import importlib.machinery
import io
import os
import platform
import random
import statistics
import sys
import sysconfig
import tempfile
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

from megatfm.data import Corpus, Loader, PackedRows, ShardWriter, ShuffledSamples
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
VOCABULARY, LENGTH, BATCH = 8000, 512, 64
SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=VOCABULARY)


def texts(most: int) -> Iterator[str]:
    """Up to `most` bytes of text files, each text once."""
    seen, total = set[bytes](), 0
    for place in PLACES:
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
                if digest in seen or not text:
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


def write(folder: Path, megabytes: float, mosaic: bool) -> tuple[int, int, int]:
    """The same samples for every contender; documents, bytes of text, tokens."""
    documents = list(texts(int(megabytes * 1e6)))
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
    return len(documents), size, tokens


def contenders(folder: Path, mosaic: bool) -> dict[str, Callable[[], int]]:
    """Each reads every sample once and returns how many tokens there were."""
    corpus = Corpus.open(folder / "ours")
    tars = sorted(map(str, (folder / "tars").iterdir()))
    objective, seeds = Causal(SPECIAL), iter(range(10**9))
    streams = max(1, min(64, corpus.n_blocks // 10))  # in a small corpus, those would be smaller than blocks

    def raw() -> int:
        unpack = zstandard.ZstdDecompressor()
        for block in range(corpus.n_blocks):
            unpack.decompress(corpus.frame_bytes(block))
        return corpus.n_tokens

    def samples() -> int:
        found = ShuffledSamples(corpus, seed=next(seeds), streams=streams)
        return sum(len(next(found)[1]) for _ in range(corpus.n_samples))

    def rows() -> int:
        options = {"sequence_length": LENGTH, "seed": next(seeds), "streams": streams}
        packed = PackedRows(corpus, objective, **options)  # type: ignore[arg-type]
        with Loader(packed, global_batch=BATCH, micro_batch=BATCH, stop=len(packed)) as loader:
            for _ in loader:
                pass
        return corpus.n_tokens

    def webdataset() -> int:
        data = wds.WebDataset(tars, shardshuffle=len(tars), seed=next(seeds), empty_check=False)
        return sum(len(sample["tokens.npy"]) for sample in data.shuffle(1000).decode())

    def streaming() -> int:
        from streaming import StreamingDataset

        data = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=1, shuffle_seed=next(seeds)
        )
        return sum(len(sample["tokens"]) for sample in data)

    found = {
        "raw zstd": raw,
        "megatfm samples": samples,
        f"megatfm rows of {LENGTH}": rows,
        "webdataset": webdataset,
    }
    return found | ({"MosaicML Streaming": streaming} if mosaic else {})


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
    parser.add_argument("--megabytes", type=float, default=1100, help="of text, at most")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mosaic", metavar="FOLDER")
    options = parser.parse_args()
    if options.mosaic:
        with_mosaic(options.mosaic)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents, size, tokens = write(folder, options.megabytes, bool(options.mosaic))
        runs = contenders(folder, bool(options.mosaic))
        wall: dict[str, list[float]] = {name: [] for name in runs}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(options.rounds + 1):
            for contender in random.Random(number).sample(list(runs), len(runs)):
                start, start_cpu = time.perf_counter(), time.process_time()
                assert runs[contender]() == tokens, contender
                if number:  # the first round fills the page cache
                    wall[contender].append(time.perf_counter() - start)
                    cpu[contender].append(time.process_time() - start_cpu)
        disk = sum(shard.bytes for shard in Corpus.open(folder / "ours").manifest.shards)
    print(f"# Reading training data, {time.strftime('%Y-%m-%d')}\n")
    print(
        f"{documents:,} documents, {size:,} bytes of text, {tokens:,} tokens; {disk:,} bytes on disk as zstd frames."
    )
    print(
        f"`python {' '.join(sys.argv)}`; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, ",
        end="",
    )
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, webdataset {wds.__version__}.\n")
    print(
        "| | s, median | M tokens/s | speed of raw zstd, median of rounds | CPU s, median |\n|---|---|---|---|---|"
    )
    for name, seconds in wall.items():
        middle = statistics.median(seconds)
        share = statistics.median(a / b for a, b in zip(wall["raw zstd"], seconds, strict=True))
        cells = (
            f"{middle:.3f} | {tokens / middle / 1e6:.1f} | {share:.2f} | {statistics.median(cpu[name]):.3f}"
        )
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
