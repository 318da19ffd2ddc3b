"""Preparing text: the speed of each stage on one core, and recall of near duplicates by language.

    python benchmarks/prep.py speed --megabytes 1000 --rounds 10 --out benchmarks/results
    python benchmarks/prep.py recall --out benchmarks/results

speed: cleaning, comparing and tokenizing what text the machine has (see `texts.py`): documentation, manuals, the
sources of Python and its packages, and what `--places` hold besides, each text once. Stages take turns in each round,
and each round gets text that no round had before, so that nothing is timed on a repeated corpus. Encoders start cold,
in processes of their own, with a tokenizer trained on 8 MB. CPU seconds of one thread; medians of rounds.

recall: of near duplicates and evaluation texts in languages with and without spaces, where some characters of a text
are others. Texts are drawn from the characters of a language, as words where it has spaces. The exact similarity is
that of the sets of runs of five words by white space, in Chinese and Japanese of five characters, in Thai of twenty.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
from texts import iter_texts

# ---------------------------------------------------------------------------------------------------- speed

PIECE = 8192
FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb", "pii", "language")
ENCODERS = ("byte-bpe", "sentencepiece-bpe")
TRAIN_BYTES = 8 * 10**6
COMPARED = 40
"""Every n-th document is also encoded by the tokenizer itself, which is slow, and compared."""


@common.argument("--megabytes", type=int, default=1000, help="text for all rounds together")
@common.argument("--rounds", type=int, default=10)
@common.argument("--vocabulary", type=int, default=32_000)
@common.argument("--places", nargs="*", default=[], metavar="FOLDER", help="more folders of text")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-prep.md")
def run_speed(args: argparse.Namespace) -> None:
    # Documents are shuffled, so that every round has text of all kinds.
    documents = list(iter_texts(args.megabytes * 10**6, args.places))
    random.Random(0).shuffle(documents)
    parts = [documents[number :: args.rounds] for number in range(args.rounds)]
    with TemporaryDirectory() as name:
        speeds = measure_rounds(parts, Path(name), args.vocabulary)
    write_page(speeds, documents, args)


def measure_rounds(parts: Sequence[Sequence[str]], folder: Path, vocabulary: int) -> dict[str, list[float]]:
    """Return the speeds of all rounds by stage. Encoders run in processes of their own, on the other core."""
    speeds: dict[str, list[float]] = {}
    for kind in ENCODERS:
        train(folder / kind, kind, parts[0], vocabulary)
    for number, part in enumerate(parts):
        with ThreadPoolExecutor(1) as aside:
            encoded = aside.submit(encode_cold, folder, part)
            named_speeds = [*measure_stages(part), *encoded.result()]
        for name, speed in named_speeds:
            speeds.setdefault(name, []).append(speed)
        print(f"round {number + 1} of {len(parts)}", file=sys.stderr)
    return speeds


def encode_cold(folder: Path, documents: Sequence[str]) -> list[tuple[str, float]]:
    """Return names and speeds of the encoders, each in a fresh process."""
    by_kind = (common.call_in_new_process(encode, folder / kind, documents) for kind in ENCODERS)
    return [named_speed for named_speeds in by_kind for named_speed in named_speeds]


def measure_stages(documents: Sequence[str]) -> Iterator[tuple[str, float]]:
    from pydantic import TypeAdapter

    from megatfm.config.prep_steps import DedupConfig, StepConfig
    from megatfm.data_prep.dedup.methods import ExactDedup, make_dedup_method
    from megatfm.data_prep.documents import Document
    from megatfm.data_prep.filters.base import CountingFilter, make_filter
    from megatfm.data_prep.filters.text import FixUnicode

    records = [Document(str(number), text) for number, text in enumerate(documents)]
    size = count_megabytes(documents)
    quarter = records[::4]
    pieces = [
        Document(f"{document.id}.{at}", document.text[at : at + PIECE])
        for document in records
        for at in range(0, len(document.text) - PIECE + 1, PIECE)
    ]

    def make_step(apply: Any) -> Callable[[], object]:
        return lambda: [apply(document) for document in records]

    def make_scan(name: str, over: Sequence[Document]) -> Callable[[], object]:
        search = make_dedup_method(TypeAdapter(DedupConfig).validate_python({"name": name}))
        return lambda: list(search.compute_keys(over))

    stages: dict[str, tuple[Callable[[], object], float]] = {
        "fix unicode, MB/s": (make_step(CountingFilter(FixUnicode())), size),
        "hashes for exact duplicates, MB/s": (lambda: list(ExactDedup().compute_keys(records)), size),
        "MinHash with shingling, thousand documents of 8 KB/s": (make_scan("minhash", pieces), len(pieces) / 1000),
        "lines, scan, MB/s": (make_scan("lines", records), size),
        "substrings, scan, MB/s": (make_scan("exact_substrings", quarter), count_megabytes(documents[::4])),
    }
    for name in FILTERS:
        config = TypeAdapter(StepConfig).validate_python({"name": name})
        stages[f"{name}, MB/s"] = (make_step(make_filter(config)), size)
    order = list(stages)
    random.shuffle(order)
    for name in order:
        run, amount = stages[name]
        begin = time.process_time()
        run()
        yield name, amount / (time.process_time() - begin)


def train(folder: Path, kind: str, documents: Sequence[str], vocabulary: int) -> None:
    from itertools import accumulate

    from megatfm.config.prep import TokenizerConfig
    from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer

    # At most a hundredth from each document, so that no long one dominates.
    starts = [text[: TRAIN_BYTES // 100] for text in documents]
    sizes = accumulate(map(len, starts))
    sample = (text for text, size in zip(starts, sizes, strict=True) if size < TRAIN_BYTES)
    folder.mkdir()
    config = TokenizerConfig(kind=kind, vocab_size=vocabulary)  # type: ignore[arg-type]
    write_tokenizer(folder, make_tokenizer_files(config, sample))


def encode(folder: Path, documents: Sequence[str]) -> list[tuple[str, float]]:
    """Return the speeds of the fast encoder, shards included, and of the tokenizer on a part of the text."""
    from megatfm import tokenizers
    from megatfm.corpus.writer import ShardWriter
    from megatfm.data_prep.fast_encode import FastEncoder

    reference = tokenizers.load(folder)
    fast = FastEncoder(reference, folder)
    size = count_megabytes(documents)
    begin = time.process_time()
    with (
        TemporaryDirectory() as shards,
        ShardWriter(shards, tokenizer_hash=reference.hash, token_dtype=reference.token_dtype) as writer,
    ):
        number = 0
        for batch in iter_batches(documents):
            for text, ids in zip(batch, fast.encode_batch(batch, 1), strict=True):
                writer.add(f"{number:09d}", ids, "", len(text))
                number += 1
        writer.finish({})
    speed = size / (time.process_time() - begin)
    sample = documents[::COMPARED]
    begin = time.process_time()
    expected = reference.encode_batch(sample, 1)
    own_speed = count_megabytes(sample) / (time.process_time() - begin)
    actual = [ids for batch in iter_batches(sample) for ids in fast.encode_batch(batch, 1)]
    assert all(a.tolist() == b.tolist() for a, b in zip(actual, expected, strict=True)), "the ids differ"
    names = f"tokenize to shards, {folder.name}, cold, MB/s", f"the tokenizer's own {folder.name}, MB/s"
    return list(zip(names, (speed, own_speed), strict=True))


def count_megabytes(documents: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in documents) / 1e6


def iter_batches(documents: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of about 4 MB, as prep does."""
    batch: list[str] = []
    for text in documents:
        batch.append(text)
        if len(batch) % 64 == 0 and sum(map(len, batch)) > 4e6:
            yield batch
            batch = []
    if batch:
        yield batch


def write_page(speeds: dict[str, list[float]], documents: Sequence[str], args: argparse.Namespace) -> None:
    names = ("numpy", "rensa", "gigatoken", "pyarrow", "tokenizers", "sentencepiece", "py3langid", "ftfy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    places = f" --places ({len(args.places)} more folders)" if args.places else ""
    page = common.Page(
        common.make_dated_path(args.out, "prep.md"),
        "Preparing text",
        f"`python benchmarks/prep.py speed --megabytes {args.megabytes} --rounds {args.rounds}{places}`",
        "",
        f"{count_megabytes(documents):,.0f} MB in {len(documents):,} documents; {common.get_cpu_name()}, one thread; "
        f"Python {platform.python_version()}, {versions}.",
        table="| Stage | Median | Lowest | Highest |",
    )
    for name, values in sorted(speeds.items()):
        page.add(f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")


# --------------------------------------------------------------------------------------------------- recall

LETTERS = {
    "Chinese": "".join(map(chr, range(0x4E00, 0x5200))),
    "Japanese": "".join(map(chr, [*range(0x3042, 0x3094), *range(0x30A2, 0x30F4), *range(0x65E0, 0x6660)])),
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์สิทธิต่างเหตุผลมโนธรรมควรปฏิบัติด้วยเจตนารมณ์แห่ง",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता समानता प्राप्त है उन्हें बुद्धि की देन",
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم",
    "German": "alle Menschen sind frei und gleich an Würde und Rechten geboren sie sind mit Vernunft begabt",
}
UNSPACED = ("Chinese", "Japanese", "Thai")
SHARES = (0.002, 0.005, 0.01, 0.02, 0.03)
CHARACTERS = 3000
EVALUATION = 120
"""Characters of an evaluation text."""


@common.argument("--rounds", type=int, default=40, help="texts of each language and share")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-language-recall.md")
def run_recall(args: argparse.Namespace) -> None:
    page = common.Page(
        common.make_dated_path(args.out, "language-recall.md"),
        "Near duplicates and evaluation texts by language",
        f"Python {platform.python_version()}, `python benchmarks/prep.py recall`: {args.rounds} texts of "
        f"{CHARACTERS:,} random characters of the language, evaluation texts of {EVALUATION} characters in the middle "
        "of others; a share of the characters is replaced by others.",
        table=(
            "| Language | Characters that differ | Similarity: exact | estimated | taken for near, at 0.75 | "
            "evaluation texts found |"
        ),
    )
    for language in LETTERS:
        for share in SHARES:
            exact, estimated, near, recalled = measure_recall(language, share, args.rounds)
            page.add(
                f"| {language} | {100 * share:.1f} % | {exact:.2f} | {estimated:.2f} | {100 * near:.0f} % | "
                f"{100 * recalled:.0f} % |"
            )


def measure_recall(language: str, share: float, rounds: int) -> tuple[float, ...]:
    """Return means over rounds: exact and estimated similarity, shares of near texts and found evaluation texts."""
    from megatfm.data_prep.dedup.hashing import compute_signatures

    results = []
    for seed in range(rounds):
        text = draw_text(language, CHARACTERS, seed)
        edited = edit(text, share, seed)
        a, b = compute_signatures([text, edited], 5, 112)
        estimated = float((a == b).mean())
        exact = compute_similarity(language, text, edited)
        results.append((exact, estimated, estimated >= 0.75, is_found(language, share, seed)))
    return tuple(statistics.fmean(column) for column in zip(*results, strict=True))


def is_found(language: str, share: float, seed: int) -> bool:
    """Return whether an evaluation text with replaced characters is found in a document."""
    from megatfm.config.prep_steps import DecontaminateConfig
    from megatfm.data_prep.documents import Document, StepStats
    from megatfm.data_prep.filters.selection import Decontaminate

    text = draw_text(language, EVALUATION, seed + 1000)
    gap = "" if language in UNSPACED else " "
    around = [draw_text(language, 500, seed + at) for at in (2000, 3000)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "set.txt"
        path.write_text(text, encoding="utf-8")
        rule = Decontaminate(DecontaminateConfig(name="decontaminate", files=(str(path),)))
        document = gap.join((around[0], edit(text, share, seed), around[1]))
        return isinstance(rule.apply(Document("x", document), StepStats("x")), str)


def draw_text(language: str, characters: int, seed: int) -> str:
    rng, letters = random.Random(seed), sorted(set(LETTERS[language]) - {" "})
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(characters // 5)]
    return ("" if language in UNSPACED else " ").join(words)[:characters]


def edit(text: str, share: float, seed: int) -> str:
    rng, letters = random.Random(seed), [*text]
    for at in rng.sample(range(len(letters)), round(share * len(letters))):
        letters[at] = rng.choice(text)
    return "".join(letters)


def compute_similarity(language: str, text: str, edited: str) -> float:
    length = 20 if language == "Thai" else 5
    first, second = (
        {tuple(units[at : at + length]) for at in range(len(units) - length + 1)}
        for units in ((text, edited) if language in UNSPACED else (text.split(), edited.split()))
    )
    return len(first & second) / len(first | second)


PARTS = {"speed": run_speed, "recall": run_recall}

if __name__ == "__main__":
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    common.run_part(__doc__, PARTS)
