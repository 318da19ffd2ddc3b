"""Cost of layouts on one process: blocks besides their communication, and the traffic of context parallelism.

    OMP_NUM_THREADS=1 python benchmarks/parallel.py blocks --out benchmarks/results
    python benchmarks/parallel.py traffic [--rows 8192 32768 131072] [--ranks 2 4 8 16] [--draws 8]

blocks: forward and backward of blocks under a layout against plain blocks. The process group is torch's fake one, rank
0 of 2, which copies a rank's own part where the others' would arrive. Plain blocks are as large as what a rank
computes: under tensor parallelism half of the heads and of the feed-forward width. Communication is what happens inside
a call of the process group, and is taken off; what styles, copies and autograd add around it stays in. Rounds of layout
and plain blocks alternate; a ratio is the median of the rounds' ratios of CPU seconds, the one with calls beside the
one without. Traffic is what was dispatched in one forward and backward pass. Moved is what operators that only move or
fill memory read and write in a pass, beyond those of plain blocks, and what that takes at the speed of a copy of
COPY_BYTES into memory that was written before: it explains what lies beyond it. Kept is what a block holds from its
forward to its backward pass, gathered weights among it; state is weights, gradients and two moments; both counted by
storages.

traffic: bytes of keys and values by length of documents, counted, so no clock matters. Rows are filled with documents
of exponentially distributed lengths. Causal attention, zigzag shards, one row a micro-batch. The figures are those of
the rank that receives most, in both passes of a layer: bytes with a ring, bytes with the method that is chosen, and
exchanges. A token's keys and values are 8 heads of 128 each, in bfloat16; a ring sends their gradients in float32.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import common
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatfm.config import GQAAttentionConfig, ModelConfig, ParallelConfig
from megatfm.config.ffn import DenseFFNConfig
from megatfm.engines.interface import PRECISIONS
from megatfm.engines.native.engine import shard_parameters
from megatfm.engines.native.zero import DataParallel, ZeroOptions
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.attention.patterns.mask import find_reachable_keys
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, compute_token_indices, is_sparse_fetch
from megatfm.parallel.mesh import AXES, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.train.process_state import keep_freed_memory
from megatfm.verify.traffic import TrafficCounter

# --------------------------------------------------------------------------------------------------- blocks

LAYOUTS = {
    "tp2": ParallelConfig(tp=2, dp_shard=1, zero=0),
    "tp2 without sequence parallel": ParallelConfig(tp=2, dp_shard=1, zero=0, sequence_parallel=False),
    "zero3": ParallelConfig(dp_shard=2),
    "zero2": ParallelConfig(dp_shard=2, zero=2),
    "zero1": ParallelConfig(dp_shard=2, zero=1),
}
TARGET = 1.15
"""Ratio for the styles of tensor parallelism, eager."""
HEAD = 32
COPY_BYTES = 2**26
MOVES = (
    *("copy_", "_to_copy", "clone", "cat", "zeros", "new_zeros", "zero_", "fill_"),
    *("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "_foreach_copy_"),
)
"""Operators that compute nothing; the last line's are FSDP2's."""
COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "allreduce"),
    *("all_gather_single", "reduce_scatter_single"),  # their names from torch 2.13 on
)


class Blocks(nn.Module):
    """The blocks of a decoder, by their own names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = model.get_submodule("decoder.layers")

    def forward(self, x_BTD: Tensor, layout: SequenceMetadata) -> Tensor:
        for depth, block in enumerate(self.get_submodule("decoder.layers").children()):
            x_BTD = block(x_BTD, layout.at_layer(depth, 0.0), None, None, None)
        return x_BTD


class MovedBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes that the operators MOVES read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in MOVES:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())
        return result


@contextmanager
def time_collectives() -> Iterator[list[float]]:
    """Context manager that lists the CPU seconds of each call of the process group."""
    seconds: list[float] = []

    def make_timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            if method := getattr(dist.ProcessGroup, name, None):
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, make_timed(method)))
        yield seconds


def make_model_config(width: int, layers: int, parts: int) -> ModelConfig:
    attention = GQAAttentionConfig(n_heads=width // HEAD // parts, head_dim=HEAD)
    ffn = DenseFFNConfig(d_ff=8 * width // 3 // 16 * 16 // parts)
    return ModelConfig(vocab_size=64, d_model=width, n_layers=layers, attention=attention, ffn=ffn)


def make_blocks(width: int, layers: int, parallel: ParallelConfig, parts: int) -> tuple[Blocks, DataParallel]:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with torch.device("meta"):
        model = build(make_model_config(width, layers, parts))
    layout = parallelize(model, mesh, sequence_parallel=parallel.sequence_parallel)
    zero_options = ZeroOptions(parallel.zero, parallel.grad_accumulation)
    blocks = Blocks(model)
    data = shard_parameters(blocks, layout, mesh, zero_options, PRECISIONS["fp32"], torch.device("cpu"))
    for block in data.local.values():
        nn.init.normal_(block, std=0.02)
    return blocks, data


def make_pass(blocks: nn.Module, data: DataParallel | None, width: int, tokens: int, held: int) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass of a row. held: tokens on this rank between blocks."""
    layout = SequenceMetadata(torch.arange(tokens)[None], None)
    x_BTD = torch.randn(1, held, width, requires_grad=True)

    def run() -> None:
        if data:
            data.start_microbatch(is_last=True)
        blocks(x_BTD, layout).sum().backward()
        if data:
            data.reduce()
            data.zero_grad()
        else:
            blocks.zero_grad(set_to_none=True)

    return run


def make_plain_blocks(width: int, layers: int, parts: int) -> Blocks:
    blocks = Blocks(build(make_model_config(width, layers, parts)))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    return blocks


def measure_saved_bytes(blocks: nn.Module, data: DataParallel, width: int, tokens: int, held: int) -> int:
    """Return the bytes held between a forward and a backward pass, without weights."""
    layout = SequenceMetadata(torch.arange(tokens)[None], None)
    x_BTD = torch.randn(1, held, width, requires_grad=True)
    data.start_microbatch(is_last=True)
    size, result = common.measure_saved_bytes(lambda: blocks(x_BTD, layout), list_local_tensors(blocks, data))
    result.sum().backward()
    data.reduce()
    return size


def list_local_tensors(blocks: nn.Module, data: DataParallel) -> list[Tensor]:
    """Return the weights that this rank always holds."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in blocks.parameters()]
    return [*(w.detach() for w in weights), *data.local.values()]


def count_state_bytes(blocks: nn.Module, data: DataParallel) -> int:
    """Return the bytes of weights, gradients and Adam's two moments after a backward pass."""
    moments = 2 * sum(t.nbytes for t in data.local.values())
    return common.count_storage_bytes([*list_local_tensors(blocks, data), *data.gradients().values()]) + moments


def count_moved_bytes(run: Callable[[], None]) -> int:
    with MovedBytes() as moved:
        run()
    return moved.bytes


def measure_copy_rate() -> float:
    """Return the bytes a second, read and written, of a large copy: the fastest of several."""
    source, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    return 2 * COPY_BYTES / min(time_calls(lambda: target.copy_(source), 1) for _ in range(5))


def time_calls(run: Callable[[], object], times: int) -> float:
    """Return the mean CPU seconds of `times` calls."""

    def repeat() -> None:
        for _ in range(times):
            run()

    return common.time_call(repeat, time.process_time) / times


def compare(name: str, width: int, args: argparse.Namespace) -> str:
    parallel = LAYOUTS[name]
    blocks, data = make_blocks(width, args.layers, parallel, 1)
    held = args.tokens // (parallel.tp if parallel.sequence_parallel else 1)
    actual = make_pass(blocks, data, width, args.tokens, held)
    plain = make_plain_blocks(width, args.layers, parallel.tp)
    reference = make_pass(plain, None, width, args.tokens, args.tokens)
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with TrafficCounter({str(mesh.group(axis).group_name): axis for axis in AXES}) as traffic:
        actual()
    reference()
    flows = traffic.list_traffic()
    moved = (count_moved_bytes(actual) - count_moved_bytes(reference)) / args.layers
    rounds = []
    for _ in range(args.rounds):
        with time_collectives() as in_calls:
            layout_time = time_calls(actual, args.times)
        times = layout_time, sum(in_calls) / args.times, time_calls(reference, args.times)
        rounds.append([1e3 * value / args.layers for value in times])
    held_bytes = measure_saved_bytes(blocks, data, width, args.tokens, held)
    cells = (
        name,
        width,
        f"{statistics.median(plain for _, _, plain in rounds):.2f}",
        f"{statistics.median(layout - calls - plain for layout, calls, plain in rounds):+.2f}",
        f"**{statistics.median((layout - calls) / plain for layout, calls, plain in rounds):.2f}**",
        f"{statistics.median(layout / plain for layout, _, plain in rounds):.2f}",
        f"{moved / 1e6:.1f}",
        f"{1e3 * moved / args.copy_rate:.2f}",
        sum(flow.calls for flow in flows),
        f"{sum(flow.sent_bytes for flow in flows) / 1e6:.2f}",
        f"{held_bytes / args.layers / 1e6:.2f}",
        f"{count_state_bytes(blocks, data) / args.layers / 1e6:.2f}",
    )
    data.zero_grad()
    return f"| {' | '.join(map(str, cells))} |"


@common.argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
@common.argument("--widths", nargs="+", type=int, default=[256, 1024])
@common.argument("--tokens", type=int, default=128)
@common.argument("--layers", type=int, default=4)
@common.argument("--rounds", type=int, default=20)
@common.argument("--times", type=int, default=5, help="passes in a round")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-parallel.md")
def run_blocks(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))  # as in training
    args.copy_rate = measure_copy_rate()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    page = common.Page(
        common.make_dated_path(args.out, "parallel.md"),
        "Blocks under a layout",
        f"torch {torch.__version__}, one thread of {os.cpu_count()} cores, float32, eager, {args.layers} blocks, "
        f"a row of {args.tokens} tokens, {args.rounds} rounds of {args.times} passes; `python benchmarks/parallel.py "
        "blocks`, whose head says how it is measured. A pass goes forward and back through all blocks; times are CPU "
        "time of a block. More and ratio are without the process group's own calls. The target of the ratio is "
        f"{TARGET} for tensor parallelism.",
        table=(
            "| Layout | Width | Plain, ms | More, ms | Ratio | With calls | MB moved a block | ms for these | "
            "Collectives a pass | MB sent a pass | MB kept a block | MB of state a block |"
        ),
    )
    for width in args.widths:
        for name in args.layouts:
            page.add(compare(name, width, args))


# -------------------------------------------------------------------------------------------------- traffic

NUMBERS_PER_TOKEN = 2 * 8 * 128
"""Numbers of keys and values."""
ROW_LENGTH = 0
"""A length that stands for documents as long as the row."""
LENGTHS = (300, 1000, 4000, 16_000, ROW_LENGTH)


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
    needs = [find_reachable_keys(Full(causal=True), row, at) for at in dealt]
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


@common.argument("--rows", type=int, nargs="+", default=[8192, 32_768, 131_072])
@common.argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
@common.argument("--draws", type=int, default=8)
def run_traffic(args: argparse.Namespace) -> None:
    figures = "needed, MB | ring, MB | now, MB | ring ÷ now | exchanges | fetched | plan, ms"
    page = common.Page(None, "Traffic of context parallelism", table=f"| row | cp | mean document | {figures} |")
    for length, size, mean in itertools.product(args.rows, args.ranks, LENGTHS):
        if mean < length:
            page.add(format_row(length, size, mean, args.draws))


PARTS = {"blocks": run_blocks, "traffic": run_traffic}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
