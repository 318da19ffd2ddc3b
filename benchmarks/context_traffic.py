"""Bytes of keys and values that context parallelism sends, by length of documents: counted, so no clock matters.

    python benchmarks/context_traffic.py [--rows 8192 32768 131072] [--ranks 2 4 8 16] [--draws 8]

Rows are filled with documents of exponentially distributed lengths. Causal attention, zigzag shards, one row a
micro-batch. The figures are those of the rank that receives most, in both passes of a layer: bytes with a ring, bytes
with the method that is chosen, and exchanges. A token's keys and values are 8 heads of 128 each, in bfloat16; a ring
sends their gradients in float32.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import common
import numpy as np
import torch

from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.mask import find_reachable_keys
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, is_sparse_fetch, token_indices

NUMBERS_PER_TOKEN = 2 * 8 * 128
"""Numbers of keys and values."""
ROW_LENGTH = 0
"""A length that stands for documents as long as the row."""
LENGTHS = (300, 1000, 4000, 16_000, ROW_LENGTH)
PATTERN = Full(causal=True)


@dataclass(frozen=True)
class RankStub:
    """Stands for `ContextParallel` on one of several ranks."""

    rank: int
    size: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of both passes that a rank gets, and exchanges; needed: bytes of the keys that are seen, and gradients."""

    ring: float
    now: float
    needed: float
    exchanges: int
    plan_ms: float


def draw_row(length: int, mean: int, random: np.random.Generator) -> SequenceMetadata:
    """Draw a row of documents; the last is cut at the row's end."""
    documents = torch.zeros(1, length, dtype=torch.int64)
    if mean != ROW_LENGTH:
        ends = np.cumsum(np.maximum(1, random.exponential(mean, 8 * length // mean + 64)).astype(np.int64))
        documents = torch.from_numpy(np.searchsorted(ends, np.arange(length), "right"))[None]
    return SequenceMetadata(torch.zeros_like(documents), documents)


def count_traffic(row: SequenceMetadata, ranks: int) -> Traffic:
    """Count the traffic of a ring, and of the method that context parallelism chooses."""
    length, dealt = row.length, token_indices(row.length, ranks, is_zigzag=True)
    start = time.perf_counter()
    needs = [find_reachable_keys(PATTERN, row, at) for at in dealt]
    if fetches := is_sparse_fetch(dealt, needs):
        FetchPlan.build(cast(ContextParallel, RankStub(0, ranks)), dealt, needs)
    plan_ms = 1000 * (time.perf_counter() - start)
    round_ = length * (ranks - 1) / ranks
    ring = NUMBERS_PER_TOKEN * (2 * 2 * round_ + 4 * round_)
    fetched = NUMBERS_PER_TOKEN * 2 * 2 * max(len(need) - len(at) for need, at in zip(needs, dealt, strict=True))
    now, exchanges = (fetched, 2) if fetches else (ring, 3 * (ranks - 1))
    return Traffic(ring, now, fetched, exchanges, plan_ms)


def format_table(rows: list[int], ranks: list[int], draws: int) -> Iterator[str]:
    """Yield the lines of a table: medians over draws."""
    yield "| row | cp | mean document | needed, MB | ring, MB | now, MB | ring ÷ now | exchanges | fetched | plan, ms |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for length in rows:
        for size in ranks:
            for mean in LENGTHS:
                if mean >= length:
                    continue
                random = np.random.default_rng(length + size)
                traffic = [count_traffic(draw_row(length, mean, random), size) for _ in range(draws)]
                ring, now, needed, plan = (
                    statistics.median(getattr(x, name) for x in traffic)
                    for name in ("ring", "now", "needed", "plan_ms")
                )
                exchanges = sorted({x.exchanges for x in traffic})
                fetched = sum(x.exchanges == 2 for x in traffic)
                shown = f"{mean:,}" if mean else "the row"
                yield (
                    f"| {length:,} | {size} | {shown} | {needed / 1e6:.1f} | {ring / 1e6:.1f} | "
                    f"{now / 1e6:.1f} | {ring / now:.1f} | {3 * (size - 1)} → {' or '.join(map(str, exchanges))} | "
                    f"{fetched}/{draws} | {plan:.1f} |"
                )


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    for line in format_table(args.rows, args.ranks, args.draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
