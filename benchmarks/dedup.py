"""Growth of the search for duplicates with the corpus: CPU seconds, bytes read and written, disk and memory.

    python benchmarks/dedup.py --gigabytes 1 2 4 8 --rounds 3 --out benchmarks/results

The search alone is measured, on hashes like those of synthetic text with repeats: 12.5 million
lines a GB (80 bytes a line; a tenth of them is one line, a tenth repeats others), and 200,000 signatures of documents a
GB (5 KB a document; a tenth copies of others, with a tenth of the hashes changed). What comes before and after,
scanning and thinning text, passes over it once each: `prep.py` measures its speed. Each measurement is a process of its
own, on one thread; sizes, memories and others take turns. DuckDB gets the same hashes as Parquet, one thread and the
same memory; datatrove's MinHash the same text as ours, `--text` megabytes, from documents to clusters, with words at
white space, as spaCy's would be slower. Imports don't count. It needs `pip install duckdb`, and datatrove, which
`megatfm[test]` brings.
"""

import argparse
import functools
import importlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import numpy as np

LINES, DOCUMENTS = 12_500_000, 200_000
PARTS = 16
LARGE, SMALL = 2**30, 2**27
BANDS, SIMILARITY = 14, 0.75

OURS = ("megatfm.data_prep.dedup.methods", "megatfm.data_prep.dedup.clusters", "megatfm.config.prep_steps")
Figures = dict[str, Any]
Case = tuple[str, float, int]
"""Kind, gigabytes, and bytes of memory."""


@common.argument("--gigabytes", type=float, nargs="+", default=[1, 2, 4, 8])
@common.argument("--rounds", type=int, default=3)
@common.argument("--text", type=float, default=32, help="megabytes for datatrove and ours")
@common.argument("--folder", type=Path, help="where the index lies meanwhile; left out, a temporary one")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-dedup.json")
def main(args: argparse.Namespace) -> None:
    kinds = (("lines", LARGE), ("lines", SMALL), ("duckdb", SMALL), ("near", LARGE), ("near", SMALL))
    cases = [(kind, size, memory) for size in args.gigabytes for kind, memory in kinds]
    cases += [(kind, args.text / 1000, LARGE) for kind in ("near of text", "datatrove")]
    calls = {case: functools.partial(measure, *case, args.folder) for case in cases}
    report = summarize(common.take_turns(calls, args.rounds))
    print(json.dumps(report, indent=1))
    common.write_json(common.make_dated_path(args.out, "dedup.json"), report)


def measure(kind: str, size: float, memory: int, parent: Path | None) -> Figures:
    """Measure in a separate process."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        figures = common.call_in_new_process(measure_here, kind, Path(folder), size, memory)
    print(kind, size, memory, figures, file=sys.stderr)
    return figures


def measure_here(kind: str, folder: Path, size: float, memory: int) -> Figures:
    import psutil

    prepare, run, modules = {
        "lines": (make_lines, find_lines, OURS),
        "near": (make_signatures, find_near, OURS),
        "duckdb": (make_parquet, find_by_duckdb, ("duckdb",)),
        "near of text": (make_text, find_near_of_text, OURS),
        "datatrove": (make_text, find_by_datatrove, ("datatrove.pipeline.dedup",)),
    }[kind]
    # Another process prepares the input, so that this one's figures exclude it.
    child = os.fork()
    if child == 0:
        prepare(folder, size)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for name in modules:
        importlib.import_module(name)
    process = psutil.Process()
    before, begin = process.io_counters(), time.process_time()
    marked = run(folder, size, memory)
    after = process.io_counters()
    return {
        "seconds": round(time.process_time() - begin, 3),
        "read": after.read_chars - before.read_chars,
        "written": after.write_chars - before.write_chars,
        "disk": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "marked": marked,
    }


def make_lines(folder: Path, size: float) -> None:
    rng, total = np.random.default_rng(1), int(size * LINES)
    for part in range(PARTS):
        hashes = rng.integers(0, 2**64, total // PARTS, np.uint64)
        kind = rng.random(len(hashes))
        hashes[kind < 0.1] = 7
        repeats = np.flatnonzero(kind > 0.9)
        hashes[repeats] = hashes[rng.integers(0, len(hashes), len(repeats))]
        hashes.tofile(folder / f"rows.{part}")


def make_signatures(folder: Path, size: float) -> None:
    rng, total = np.random.default_rng(1), int(size * DOCUMENTS)
    for part in range(PARTS):
        signs = rng.integers(0, 2**32, (total // PARTS, 8 * BANDS), np.uint32)
        copies = np.flatnonzero(rng.random(len(signs)) < 0.1)
        signs[copies] = signs[rng.integers(0, len(signs), len(copies))]
        changed = rng.random((len(copies), 8 * BANDS)) < 0.1
        signs[copies] = np.where(changed, rng.integers(0, 2**32, changed.shape, np.uint32), signs[copies])
        signs.tofile(folder / f"rows.{part}")


def make_parquet(folder: Path, size: float) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    make_lines(folder, size)
    begin = 0
    for part in range(PARTS):
        hashes = np.fromfile(folder / f"rows.{part}", "<u8")
        table = pa.table({"hash": hashes, "row": np.arange(begin, begin + len(hashes))})
        pq.write_table(table, folder / f"{part}.parquet", compression="none", use_dictionary=False)
        (folder / f"rows.{part}").unlink()
        begin += len(hashes)


def make_text(folder: Path, size: float) -> None:
    """Write documents of 5 KB, a tenth of them copies with a word in fifty changed."""
    rng = np.random.default_rng(1)
    words = np.array([f"w{number:x}" for number in range(50_000)])
    documents: list[Any] = []
    with open(folder / "text.jsonl", "w") as file:
        for number in range(int(size * 1e9 / 5000)):
            chosen = rng.integers(0, len(words), 890)
            if rng.random() < 0.1 and documents:
                chosen = documents[rng.integers(0, len(documents))].copy()
                chosen[rng.integers(0, 890, 18)] = rng.integers(0, len(words), 18)
            elif len(documents) < 1000:
                documents.append(chosen)
            file.write(json.dumps({"id": str(number), "text": " ".join(words[chosen])}) + "\n")


def find_lines(folder: Path, size: float, memory: int) -> int:
    from megatfm.data_prep.dedup.first_occurrence import mark_repeats

    return _count_marked(folder, "<u8", 1, int(size * LINES), memory, mark_repeats)


def find_near(folder: Path, size: float, memory: int) -> int:
    from megatfm.data_prep.dedup.clusters import mark_near_duplicates

    def mark(rows: Any, index: Any) -> dict[str, Any]:
        return mark_near_duplicates(rows, index, BANDS, SIMILARITY)

    return _count_marked(folder, "<u4", 8 * BANDS, int(size * DOCUMENTS), memory, mark)


def find_near_of_text(folder: Path, size: float, memory: int) -> int:
    from megatfm.config.prep_steps import MinHashConfig
    from megatfm.data_prep.dedup.key_table import write_keys
    from megatfm.data_prep.dedup.methods import make_dedup_method
    from megatfm.data_prep.documents import Document

    search = make_dedup_method(MinHashConfig(name="minhash"))
    with open(folder / "text.jsonl") as file:
        documents = (Document(record["id"], record["text"]) for record in map(json.loads, file))
        count = write_keys(folder / "rows.0", search.compute_keys(documents))
    return _count_marked(folder, *search.row, count, memory, search.find_duplicates, parts=1)


def find_by_duckdb(folder: Path, size: float, memory: int) -> int:
    import duckdb

    (folder / "spilled").mkdir()
    settings = {"threads": 1, "memory_limit": f"{memory}B", "temp_directory": str(folder / "spilled")}
    query = f"""
        COPY (
            WITH firsts AS (
                SELECT hash, min(row) AS first FROM '{folder}/*.parquet' GROUP BY hash HAVING count(*) > 1
            )
            SELECT row FROM '{folder}/*.parquet' JOIN firsts USING (hash) WHERE row <> first
        ) TO '{folder}/later.out' (FORMAT parquet)
    """
    with duckdb.connect(config=settings) as connection:
        connection.execute("SET preserve_insertion_order = false")
        connection.execute(query)
        (count,) = connection.execute(f"SELECT count(*) FROM read_parquet('{folder}/later.out')").fetchall()[0]
    return int(count)


def find_by_datatrove(folder: Path, size: float, memory: int) -> int:
    import xxhash
    from datatrove.data import Document
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger

    logger.remove()
    minhash.load_word_tokenizer = lambda _: SimpleNamespace(word_tokenize=str.split)  # instead of spaCy's
    config = minhash.MinhashConfig(
        n_grams=5, num_buckets=BANDS, hashes_per_bucket=8, hash_config=HashConfig(precision=64)
    )
    signatures, buckets, removed = (str(folder / name) for name in ("signatures", "buckets", "removed"))
    with open(folder / "text.jsonl") as file:
        documents = (Document(text=record["text"], id=record["id"]) for record in map(json.loads, file))
        step = minhash.MinhashDedupSignature(output_folder=signatures, config=config)
        step._hash_func = lambda words: xxhash.xxh64_intdigest(words.encode())  # newer releases take bytes only
        step.run(documents, 0, 1)
    for band in range(BANDS):
        minhash.MinhashDedupBuckets(input_folder=signatures, output_folder=buckets, config=config).run(
            None, band, BANDS
        )
    minhash.MinhashDedupCluster(input_folder=buckets, output_folder=removed, config=config).run(None, 0, 1)
    return sum(path.stat().st_size // 4 for path in Path(removed).glob("*.remove"))


def _count_marked(
    folder: Path,
    dtype: str,
    columns: int,
    total: int,
    memory: int,
    find: Callable[[Any, Any], dict[str, Any]],
    parts: int = PARTS,
) -> int:
    from megatfm.data_prep.dedup.key_table import DedupContext, KeyTable

    def run(step: str, count: int, total: int, work: Any, join: Callable[[Iterable[Any]], Any] = lambda _: {}) -> Any:
        return join([work(number, lambda _: None) for number in range(count)])

    files = [folder / f"rows.{part}" for part in range(parts)]
    rows = KeyTable(files, dtype, columns, [total // parts] * parts)
    index = DedupContext(folder, memory, run)
    marks = index.open_marks(len(rows), find(rows, index)["marks_per_file"])
    step = 2**20
    return sum(int(marks.read(at, min(at + step, len(rows))).sum()) for at in range(0, len(rows), step))


def summarize(measurements: Mapping[Case, Sequence[Figures]]) -> dict[str, Any]:
    medians = {
        case: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        for case, rounds in measurements.items()
    }
    sizes = sorted({size for kind, size, _ in measurements if kind == "lines"})
    text = next(size for kind, size, _ in measurements if kind == "datatrove")

    def fit_slopes(kind: str, memory: int) -> dict[str, float]:
        """Return exponents of growth by least squares over logarithms; 1 is linear."""
        by_size = [medians[kind, size, memory] for size in sizes]
        keys = ("seconds", "read", "written", "disk")
        values = {key: [figures[key] for figures in by_size] for key in keys}
        return {key: round(float(np.polyfit(np.log(sizes), np.log(values[key]), 1)[0]), 3) for key in keys}

    def compute_ratio(over: Case, under: Case) -> float:
        seconds = [[figures["seconds"] for figures in measurements[case]] for case in (over, under)]
        return round(common.compute_median_ratio(*seconds), 3)

    kinds = ("lines", "near")
    names = ("numpy", "scipy", "duckdb", "datatrove")
    return {
        "date": common.today(),
        "machine": f"{common.get_cpu_name()}, {os.cpu_count()} cores, one used",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "memory_bytes": {"large": LARGE, "small": SMALL},
        "medians": [
            {"kind": kind, "gigabytes": size, "memory_bytes": memory, **figures}
            for (kind, size, memory), figures in medians.items()
        ],
        "slopes": {
            f"{kind}, {memory // 2**20} MiB": fit_slopes(kind, memory)
            for kind in kinds
            for memory in (LARGE, SMALL)
            if len(sizes) > 1
        },
        "small over large memory": {
            f"{kind}, {size:g} GB": compute_ratio((kind, size, SMALL), (kind, size, LARGE))
            for kind in kinds
            for size in sizes
        },
        "duckdb over ours": {
            f"{size:g} GB": compute_ratio(("duckdb", size, SMALL), ("lines", size, SMALL)) for size in sizes
        },
        "datatrove over ours": compute_ratio(("datatrove", text, LARGE), ("near of text", text, LARGE)),
    }


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    common.run_script(__doc__, main)
