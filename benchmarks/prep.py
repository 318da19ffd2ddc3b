"""How fast one core cleans, compares and tokenizes real text, each stage in rounds that take turns.

    python benchmarks/prep.py --megabytes 1000 --rounds 10 > benchmarks/results/DATE-prep.md

The text is what the machine has: /usr/share/doc, manual pages, the sources of Python and its packages; each file is
read once. Every round of a stage gets text that no round had before, so that nothing is timed on a repeated corpus;
encoders and caches start cold, in a process of their own. CPU seconds of one thread; medians over rounds.
"""

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PIECE = 8192
PLACES = (
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/perl",
    "/usr/lib/python3",
    sysconfig.get_path("stdlib"),
)
FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb", "redact", "language")
ENCODERS = ("byte-bpe", "sentencepiece-bpe")


def texts(limit: int) -> Iterator[str]:
    """Documents of real text, until there are `limit` bytes."""
    seen: set[tuple[int, int]] = set()
    for place in PLACES:
        for path in sorted(Path(place).rglob("*")):
            try:
                found = path.stat()
                if (
                    not path.is_file()
                    or (found.st_dev, found.st_ino) in seen
                    or path.suffix in (".pyc", ".so")
                ):
                    continue
                seen.add((found.st_dev, found.st_ino))
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                text = data.decode()
            except (OSError, UnicodeDecodeError, gzip.BadGzipFile, EOFError):
                continue
            if "\0" in text or not text.strip():
                continue
            yield text
            limit -= len(data)
            if limit <= 0:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="text for all rounds together")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--encode", nargs=2, metavar=("KIND", "ROUND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Documents are shuffled, so that every round has text of all kinds.
    documents = list(texts(arguments.megabytes * 10**6))
    random.Random(0).shuffle(documents)
    parts = [documents[number :: arguments.rounds] for number in range(arguments.rounds)]
    if arguments.encode:
        print(encode(arguments.encode[0], parts[int(arguments.encode[1])], arguments.vocabulary))
        return
    speeds: dict[str, list[float]] = {}
    for number, part in enumerate(parts):
        for name, speed in measure(part):
            speeds.setdefault(name, []).append(speed)
        for kind in ENCODERS:
            again = [sys.executable, __file__, "--megabytes", str(arguments.megabytes)]
            again += [
                "--rounds",
                str(arguments.rounds),
                "--vocabulary",
                str(arguments.vocabulary),
                "--encode",
                kind,
                str(number),
            ]
            for name, speed in json.loads(
                subprocess.run(again, check=True, stdout=subprocess.PIPE).stdout
            ).items():
                speeds.setdefault(name, []).append(speed)
    write(speeds, sum(len(text.encode()) for text in documents), len(documents), arguments)


def measure(documents: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Name and speed of each stage on these documents; the order changes by chance."""
    from pydantic import TypeAdapter

    from data_prep.documents import Document
    from data_prep.duplicates import make as make_search
    from data_prep.steps import ExactDuplicates, FixUnicode, make
    from megatfm.config.prep_steps import DuplicatesConfig, StepConfig

    some = [Document(str(number), text) for number, text in enumerate(documents)]
    megabytes = sum(document.text_bytes for document in some) / 1e6
    pieces = [
        Document(f"{document.source}.{at}", document.text[at : at + PIECE])
        for document in some
        for at in range(0, len(document.text) - PIECE + 1, PIECE)
    ]

    def step(each: Any) -> Callable[[], object]:
        return lambda: [each(document) for document in some]

    def scan(name: str, over: Sequence[Document]) -> Callable[[], object]:
        search = make_search(TypeAdapter(DuplicatesConfig).validate_python({"name": name}))
        return lambda: list(search.scan(over))

    stages: dict[str, tuple[Callable[[], object], float]] = {
        "fix unicode, MB/s": (step(FixUnicode()), megabytes),
        "exact duplicates, MB/s": (step(ExactDuplicates()), megabytes),
        "MinHash with shingling, thousand documents of 8 KB/s": (scan("near", pieces), len(pieces) / 1000),
        "lines, scan, MB/s": (scan("lines", some), megabytes),
        "substrings, scan, MB/s": (scan("substrings", some), megabytes),
    }
    for name in FILTERS:
        config = TypeAdapter(StepConfig).validate_python({"name": name})
        stages[f"{name}, MB/s"] = (step(make(config)), megabytes)
    order = list(stages)
    random.shuffle(order)
    for name in order:
        run, amount = stages[name]
        begin = time.process_time()
        run()
        yield name, amount / (time.process_time() - begin)


def encode(kind: str, documents: Sequence[str], vocabulary: int) -> str:
    """Speed of the fast encoder, cold, with writing to disk, and of the tokenizer on a tenth of the same, as JSON."""
    import tempfile

    from data_prep import tokenizer
    from data_prep.fast import FastEncoder
    from megatfm.config.prep import TokenizerConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = tokenizer.make(TokenizerConfig(kind=kind, vocab_size=vocabulary), iter(documents[::4]))  # type: ignore[arg-type]
        reference = tokenizer.write(folder, files)
        fast = FastEncoder(reference, folder)
        size = sum(len(text.encode()) for text in documents) / 1e6
        begin = time.process_time()
        with open(folder / "ids", "wb") as file:
            for batch in batches(documents):
                for ids in fast.encode_batch(batch, 1):
                    file.write(ids.tobytes())
            os.fsync(file.fileno())
        speed = size / (time.process_time() - begin)
        tenth = documents[::10]
        begin = time.process_time()
        expected = reference.encode_batch(tenth, 1)
        own = sum(len(text.encode()) for text in tenth) / 1e6 / (time.process_time() - begin)
        ours = [ids for batch in batches(tenth) for ids in fast.encode_batch(batch, 1)]
        assert all(a.tolist() == b.tolist() for a, b in zip(ours, expected, strict=True)), "the ids differ"
    return json.dumps(
        {f"tokenize to disk, {kind}, cold, MB/s": speed, f"the tokenizer's own {kind}, MB/s": own}
    )


def batches(documents: Sequence[str]) -> Iterator[list[str]]:
    """About 4 MB at a time, as prep does."""
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) % 64 == 0 and sum(map(len, batch)) > 4e6:
            yield batch
            batch = []
    if batch:
        yield batch


def write(speeds: dict[str, list[float]], size: int, count: int, arguments: argparse.Namespace) -> None:
    names = ("numpy", "rensa", "gigatoken", "tokenizers", "sentencepiece", "py3langid", "ftfy")
    print("# Preparing text\n")
    print(f"`python benchmarks/prep.py --megabytes {arguments.megabytes} --rounds {arguments.rounds}`\n")
    print(
        f"{size / 1e6:,.0f} MB in {count:,} documents; {platform.processor() or platform.machine()}, one thread; Python"
    )
    print(f"{platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in names) + ".\n")
    print("| Stage | Median | Lowest | Highest |\n|---|---:|---:|---:|")
    for name, found in sorted(speeds.items()):
        print(f"| {name} | {statistics.median(found):.1f} | {min(found):.1f} | {max(found):.1f} |")


if __name__ == "__main__":
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    main()
