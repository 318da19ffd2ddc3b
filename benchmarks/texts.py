"""Texts that other benchmarks read: descriptions of Debian's packages, documents of letters, files of this machine.

    python benchmarks/texts.py debian OUT [--language de]
    python benchmarks/texts.py letters OUT

debian: labelled texts that every Debian machine with a network can make. Writes OUT/KIND.{train,validation,test}.jsonl:

    topics       {"text", "label"}: a description, and its section of the archive
    pairs        {"first", "second", "label"}: a synopsis and a description, of one package ("same") or two ("other")
    translation  {"source", "target"}: English and LANGUAGE, translated by people (with --language)

The hash of a source package's name decides the split, so packages of one source never lie in two. apt-get fetches the
lists into a temporary folder. Descriptions are under the licences of their packages: don't commit the files.

letters: texts whose pairs a small model learns to tell apart, documents of eight letters, drawn from two of their own.

    python benchmarks/finetuning.py compare letters --only pairs-200 pairs-2000 --vocab 300 --heads 2 --steps 300 \
        --work runs/letters --out benchmarks/results --page pairs-help

reads them in debian's place:

    OUT/topics.train.jsonl                      {"text"}: a document, to pretrain on
    OUT/pairs.{train,validation,test}.jsonl     {"first", "second", "label"}: half a document, and its other half
                                                ("same") or half of another ("other")

`iter_texts` yields manuals, documentation and Python sources of this machine, each file once (deduplicated by hash).
"""

import argparse
import gzip
import hashlib
import os
import random
import re
import string
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import common
from blake3 import blake3

# --------------------------------------------------------------------------------------------------- debian

MIN_CHARACTERS, MIN_TEXTS_OF_SECTION = 120, 300
SAME_SECTION_SHARE = 0.98
"""Share of the "other" pairs whose texts are of one section, so that the topic doesn't give the label away."""


class Package(NamedTuple):
    source: str
    section: str
    synopsis: str
    description: str


@common.argument("out", type=common.make_output_folder)
@common.argument("--language", help="of translations, for example de")
def run_debian(args: argparse.Namespace) -> None:
    packages, translations = read_packages(args.language)
    kinds = {"topics": iter_topics(packages), "pairs": iter_pairs(packages), "translation": translations}
    rows: dict[str, list[Mapping[str, str]]] = {}
    for kind, sourced_rows in kinds.items():
        for source, row in sourced_rows:
            rows.setdefault(f"{kind}.{choose_split(source)}", []).append(row)
    for name, content in sorted(rows.items()):
        common.write_rows(args.out / f"{name}.jsonl", content)
        print(f"{name}: {len(content):,} rows")


def choose_split(source: str) -> str:
    """Return the split of a source package: a twentieth each is for validation and test."""
    bucket = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


def read_packages(language: str | None) -> tuple[list[Package], list[tuple[str, Mapping[str, str]]]]:
    """Return packages with distinct long descriptions, and pairs of translated paragraphs by package."""
    with TemporaryDirectory() as folder:
        available, texts = fetch_lists(Path(folder), ["en", *([language] if language else [])])
    english = {package: bodies["en"] for (package, _), bodies in texts.items() if "en" in bodies}
    by_description: dict[str, Package] = {}
    for fields in iter_stanzas(available):
        synopsis, _, body = english.get(fields["Package"], "").partition("\n")
        description = unwrap(body)
        source = fields.get("Source", fields["Package"]).split()[0]
        section = fields.get("Section", "").rpartition("/")[2]
        if len(description) >= MIN_CHARACTERS:
            by_description.setdefault(description, Package(source, section, synopsis.strip(), description))
    return list(by_description.values()), list(iter_translations(texts, language)) if language else []


def fetch_lists(folder: Path, languages: list[str]) -> tuple[str, dict[tuple[str, str], dict[str, str]]]:
    """Fetch the lists into a folder; return those of packages, and descriptions by package, hash and language."""
    (folder / "partial").mkdir()
    options = ["-o", f"Dir::State::lists={folder}", "-o", "APT::Sandbox::User=root"]
    language_option = f"Acquire::Languages={','.join(languages)}"
    subprocess.run(["apt-get", "-qq", *options, "-o", language_option, "update"], check=True)
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for name in languages:
        paths = sorted(folder.glob(f"*_i18n_Translation-{name}*"))
        contents = (capture_output("/usr/lib/apt/apt-helper", "cat-file", str(path)) for path in paths)
        for fields in chain.from_iterable(map(iter_stanzas, contents)):
            if body := fields.get(f"Description-{name}"):
                texts.setdefault((fields["Package"], fields.get("Description-md5", "")), {})[name] = body
    return capture_output("apt-cache", *options, "dumpavail"), texts


def capture_output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8", "replace")


def iter_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package in a control file."""
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in block.split("\n"):
            if line[:1] in (" ", "\t") and key:
                fields[key] += "\n" + line[1:]
            elif ":" in line:
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        if fields.get("Package"):
            yield fields


def unwrap(body: str) -> str:
    """Join the lines of each paragraph; a line with a dot alone separates paragraphs."""
    paragraphs = re.sub(r"\n\.\n", "\n\n", "\n" + body)
    return re.sub(r"[ \t]*\n(?!\n)[ ]?", " ", paragraphs).replace("  ", " ").strip()


def iter_topics(packages: list[Package]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield source and row of each package in a section with enough texts."""
    counts = Counter(package.section for package in packages)
    for package in packages:
        if counts[package.section] >= MIN_TEXTS_OF_SECTION:
            yield package.source, {"text": package.description, "label": package.section}


def iter_pairs(packages: list[Package]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield source and row of each package: half with their own descriptions, half with another's of the same split."""
    draw = random.Random(0)
    groups: dict[tuple[str, str], list[Package]] = {}
    splits: dict[str, list[Package]] = {}
    for package in packages:
        split = choose_split(package.source)
        groups.setdefault((split, package.section), []).append(package)
        splits.setdefault(split, []).append(package)
    for package in packages:
        split, described = choose_split(package.source), package
        if draw.random() < 0.5:
            for _ in range(100):  # a section may hold one source alone
                is_same_section = draw.random() < SAME_SECTION_SHARE
                described = draw.choice(groups[split, package.section] if is_same_section else splits[split])
                if described.source != package.source:
                    break
        label = "same" if described is package else "other"
        if label == "same" or described.source != package.source:
            yield package.source, {"first": package.synopsis, "second": described.description, "label": label}


def iter_translations(
    texts: Mapping[tuple[str, str], Mapping[str, str]], language: str
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield package and row of each distinct pair of paragraphs of similar length."""
    pairs_so_far = set()
    for (package, _), bodies in texts.items():
        if "en" not in bodies or language not in bodies:
            continue
        columns = []
        for body in (bodies["en"], bodies[language]):
            synopsis, _, long = body.partition("\n")
            columns.append([synopsis.strip(), *(text.strip() for text in unwrap(long).split("\n\n"))])
        for pair in zip(*columns, strict=False):
            source, target = pair
            is_usable = source and target and source != target and 0.5 < len(source) / len(target) < 2
            if is_usable and pair not in pairs_so_far:
                pairs_so_far.add(pair)
                yield package, {"source": source, "target": target}


# -------------------------------------------------------------------------------------------------- letters

N_DOCUMENTS, N_LETTERS = 20_000, 8
N_PAIRS = {"train": 10_000, "validation": 2_000, "test": 2_000}


@common.argument("out", type=common.make_output_folder)
def run_letters(args: argparse.Namespace) -> None:
    folder: Path = args.out
    draw = random.Random(0)
    common.write_rows(
        folder / "topics.train.jsonl", ({"text": " ".join(make_document(draw))} for _ in range(N_DOCUMENTS))
    )
    for split, n_pairs in N_PAIRS.items():
        common.write_rows(folder / f"pairs.{split}.jsonl", iter_letter_pairs(draw, n_pairs))


def make_document(draw: random.Random) -> list[str]:
    return draw.choices(draw.sample(string.ascii_lowercase, 2), k=N_LETTERS)


def iter_letter_pairs(draw: random.Random, count: int) -> Iterator[dict[str, str]]:
    """Yield pairs of halves, of one document or of two."""
    for _ in range(count):
        first, unrelated = make_document(draw), make_document(draw)
        is_same = draw.random() < 0.5
        second = (first if is_same else unrelated)[N_LETTERS // 2 :]
        label = "same" if is_same else "other"
        yield {"first": " ".join(first[: N_LETTERS // 2]), "second": " ".join(second), "label": label}


# -------------------------------------------------------------------------------------------- files of this machine

PLACES = ("/usr/share/doc", "/usr/share/man", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
KINDS = {
    "", ".c", ".cpp", ".css", ".cuh", ".h", ".hpp", ".html", ".js", ".md", ".py", ".pyi", ".rst", ".toml", ".txt",
}  # fmt: skip


def iter_texts(most: int, places: list[str]) -> Iterator[str]:
    """Yield distinct texts of files, up to `most` bytes."""
    digests, total = set[bytes](), 0
    for text in filter(None, map(read_text, iter_files(places))):
        digest = blake3(text.encode()).digest()
        if digest not in digests:
            digests.add(digest)
            total += len(text.encode())
            yield text
            if total >= most:
                return


def iter_files(places: list[str]) -> Iterator[Path]:
    """Yield manuals and files of text, in the order of their names."""
    for place in (*PLACES, *places):
        for folder, folders, names in os.walk(place):
            folders.sort()
            for path in (Path(folder, name) for name in sorted(names)):
                is_text = folder.startswith("/usr/share/man") or Path(path.name.removesuffix(".gz")).suffix in KINDS
                if is_text and path.is_file() and not path.is_symlink():
                    yield path


def read_text(path: Path) -> str:
    """Return the text of a file; "" if it has none."""
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (UnicodeDecodeError, OSError, EOFError):
        return ""
    return text if text.strip() else ""


PARTS = {"debian": run_debian, "letters": run_letters}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
