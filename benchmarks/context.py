"""Context parallelism's traffic against a ring's, and what a longer context is worth to a trained decoder.

    python benchmarks/context.py traffic [--rows 8192 32768 131072] [--ranks 2 4 8 16] [--draws 8]
    megatfm launch quickstart --nproc 2 parallel.zero=0
    python benchmarks/context.py worth runs/quickstart --corpus corpora/quickstart/validation --out benchmarks/results

traffic: bytes of keys and values by length of documents, counted, so no clock matters. Rows are filled with documents
of exponentially distributed lengths. Causal attention, zigzag shards, one row a micro-batch. The figures are those of
the rank that receives most, in both passes of a layer: bytes with a ring, bytes with the method that is chosen, and
exchanges. A token's keys and values are 8 heads of 128 each, in bfloat16; a ring sends their gradients in float32.

worth: the loss of the same held-out tokens by how many before them the model sees. For a context of c tokens it reads
rows of c, each beginning c/2 after the one before. The second half of their targets counts, which have c/2 + 1 to c
tokens before them: every token of a document counts once, and the same ones at each c (Khandelwal et al. 2018 cut
contexts likewise). Targets are told apart by how far back the same token occurred last: where that is far, far context
can pay; where it never did, copying can't. Nats a token.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import common
import numpy as np
import torch
from torch import Tensor, nn

from megatfm import load
from megatfm.corpus.corpus import Corpus
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.mask import find_reachable_keys
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, compute_token_indices, is_sparse_fetch

# -------------------------------------------------------------------------------------------------- traffic

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
    length, dealt = row.length, compute_token_indices(row.length, ranks, is_zigzag=True)
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


def format_row(length: int, size: int, mean: int, draws: int) -> str:
    """Format a line of the table: medians over draws."""
    random = np.random.default_rng(length + size)
    traffic = [count_traffic(draw_row(length, mean, random), size) for _ in range(draws)]
    ring, now, needed, plan = (
        statistics.median(getattr(x, name) for x in traffic) for name in ("ring", "now", "needed", "plan_ms")
    )
    exchanges = " or ".join(map(str, sorted({x.exchanges for x in traffic})))
    fetched = sum(x.exchanges == 2 for x in traffic)
    return (
        f"| {length:,} | {size} | {f'{mean:,}' if mean else 'the row'} | {needed / 1e6:.1f} | {ring / 1e6:.1f} | "
        f"{now / 1e6:.1f} | {ring / now:.1f} | {3 * (size - 1)} → {exchanges} | {fetched}/{draws} | {plan:.1f} |"
    )


def add_traffic(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--draws", type=int, default=8)
    return run_traffic


def run_traffic(args: argparse.Namespace) -> None:
    figures = "needed, MB | ring, MB | now, MB | ring ÷ now | exchanges | fetched | plan, ms"
    page = common.Page(None, "Traffic of context parallelism", table=f"| row | cp | mean document | {figures} |")
    for length, size, mean in itertools.product(args.rows, args.ranks, LENGTHS):
        if mean < length:
            page.add(format_row(length, size, mean, args.draws))


# ---------------------------------------------------------------------------------------------------- worth

SHORTEST = 16
AT_ONCE = 4096
"""Tokens of a forward pass."""


def list_contexts(longest: int) -> list[int]:
    """Return context lengths, each twice the one before."""
    return [2**n for n in range(20) if SHORTEST <= 2**n <= longest]


def find_distances(text: Tensor) -> Tensor:
    """Return the distance to the last occurrence of the same token, int64 [n]; 0 if there is none."""
    last: dict[int, int] = {}
    back = torch.zeros(len(text), dtype=torch.int64)
    for position, token in enumerate(text.tolist()):
        back[position] = position - last.get(token, position)
        last[token] = position
    return back


def compute_losses(model: nn.Module, text: Tensor, context: int, first: int, end: int) -> Tensor:
    """Return the losses of the tokens `first` … `end - 1` of a text [n], with context/2 + 1 to `context` tokens before.

    first - 1 and end - 1 must be multiples of context/2, and first > context.
    """
    half = context // 2
    rows = text[first - 1 - half : end].unfold(0, context + 1, half)
    parts = []
    for some_rows in rows.split(max(AT_ONCE // context, 1)):
        with torch.no_grad():
            logits = model(tokens=some_rows[:, :-1].contiguous()).logits.float()
        predicted_and_targets = logits[:, half:].transpose(1, 2), some_rows[:, half + 1 :]
        parts.append(nn.functional.cross_entropy(*predicted_and_targets, reduction="none").flatten())
    return torch.cat(parts)


def judge(model: nn.Module, texts: Iterator[Tensor], longest: int) -> dict[str, Any]:
    """Return the mean loss by context length, of all targets and by the distance to their last occurrence."""
    bounds = [0, *list_contexts(longest // 2)]
    all_losses: dict[int, list[Tensor]] = {context: [] for context in list_contexts(longest)}
    back = []
    for text in texts:
        first = longest + 1
        end = (len(text) - 1) // (longest // 2) * (longest // 2) + 1
        if end <= first:
            continue
        back.append(find_distances(text)[first:end])
        for context, losses_of_context in all_losses.items():
            losses_of_context.append(compute_losses(model, text, context, first, end))
    far = torch.cat(back)
    groups = {"all": far >= 0}
    groups |= {f"{low + 1} to {high} back": (far > low) & (far <= high) for low, high in itertools.pairwise(bounds)}
    groups[f"more than {bounds[-1]} back"] = far > bounds[-1]
    groups["never"] = far == 0
    return {
        name: {
            "of": int(mask.sum()),
            "nats": {
                c: round(float(torch.cat(losses_of_context)[mask].mean()), 3)
                for c, losses_of_context in all_losses.items()
            },
        }
        for name, mask in groups.items()
        if mask.any()
    }


def iter_documents(corpus: Path) -> Iterator[Tensor]:
    """Yield the tokens of each document."""
    opened = Corpus.open(corpus)
    for block in range(opened.n_blocks):
        for _, tokens in opened.read_block(block):
            yield torch.tensor(tokens.astype("int64"))


def add_worth(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--corpus", type=Path, required=True, help="held-out documents, prepared")
    parser.add_argument("--longest", type=int, default=256, help="the longest context, a power of two")
    parser.add_argument("--out", type=common.make_output_folder, help="folder for the result of the day")
    return run_worth


def run_worth(args: argparse.Namespace) -> None:
    """Judge runs one after the other."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "date": common.today(),
        "machine": f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}",
        "runs": {},
    }
    for run in args.runs:
        model = load(run).module
        parameters = sum(p.numel() for p in model.parameters())
        judgement = judge(model, iter_documents(args.corpus), args.longest)
        result["runs"][run.name] = {"parameters": parameters, **judgement}
        print(run.name, json.dumps(judgement, indent=1), flush=True)
        common.write_json(common.make_dated_path(args.out, "context-worth.json"), result)


PARTS = {"traffic": add_traffic, "worth": add_worth}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
