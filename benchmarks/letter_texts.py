r"""Texts whose pairs a small model learns to tell apart: documents of eight letters, drawn from two of their own.

    python benchmarks/letter_texts.py letters
    python benchmarks/tasks_help.py letters --only pairs-200 pairs-2000 --vocab 300 --heads 2 --steps 300 \
        --work runs/letters --out benchmarks/results --page pairs-help

Writes the files of debian_texts.py that such a comparison reads:

    OUT/topics.train.jsonl                      {"text"}: a document, to pretrain on
    OUT/pairs.{train,validation,test}.jsonl     {"first", "second", "label"}: half a document, and its other half
                                                ("same") or half of another ("other")
"""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import common

N_DOCUMENTS, N_LETTERS = 20_000, 8
N_PAIRS = {"train": 10_000, "validation": 2_000, "test": 2_000}


def main() -> None:
    """Write all files."""
    parser = common.make_parser(__doc__)
    parser.add_argument("out", type=common.make_output_folder)
    folder: Path = parser.parse_args().out
    draw = random.Random(0)
    write_rows(folder / "topics.train.jsonl", ({"text": " ".join(make_document(draw))} for _ in range(N_DOCUMENTS)))
    for split, n_pairs in N_PAIRS.items():
        write_rows(folder / f"pairs.{split}.jsonl", iter_pairs(draw, n_pairs))


def make_document(draw: random.Random) -> list[str]:
    """Draw the letters of a document."""
    return draw.choices(draw.sample(string.ascii_lowercase, 2), k=N_LETTERS)


def iter_pairs(draw: random.Random, count: int) -> Iterator[dict[str, str]]:
    """Yield pairs of halves, of one document or of two."""
    for _ in range(count):
        first, other = make_document(draw), make_document(draw)
        is_same = draw.random() < 0.5
        second = (first if is_same else other)[N_LETTERS // 2 :]
        label = "same" if is_same else "other"
        yield {"first": " ".join(first[: N_LETTERS // 2]), "second": " ".join(second), "label": label}


def write_rows(path: Path, rows: Iterator[dict[str, str]]) -> None:
    """Write a file of JSON lines."""
    common.write_text(path, "\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
