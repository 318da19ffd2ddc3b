"""What a layout costs besides communication: forward and backward of blocks under a layout against plain blocks.

    OMP_NUM_THREADS=1 python benchmarks/parallel.py --out benchmarks/results

The process group is torch's fake one, rank 0 of 2: every collective is dispatched, allocates what it returns, and moves
nothing, so communication takes no time and all that is around it does. Plain blocks are as large as what a rank
computes: under tensor parallelism half of the heads and of the feed-forward width. Rounds of both alternate; the ratio
is the median of the rounds' ratios of CPU seconds. Traffic is what was dispatched in one forward and backward pass.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.data_parallel import DataParallel, Sharing
from megatfm.engines.native import share
from megatfm.engines.precision import PRECISIONS
from megatfm.models import build
from megatfm.ops.sequence import SequenceLayout
from megatfm.parallel.mesh import AXES, build_mesh
from megatfm.parallel.plan import lay
from megatfm.parallel.plans import PLANS
from megatfm.train.memory import keep_freed_memory
from megatfm.verify.traffic import Traffic

LAYOUTS = {
    "tp2": ParallelConfig(tp=2, dp_shard=1, zero=0),
    "tp2 without sequence parallel": ParallelConfig(tp=2, dp_shard=1, zero=0, sequence_parallel=False),
    "zero3": ParallelConfig(dp_shard=2),
    "zero2": ParallelConfig(dp_shard=2, zero=2),
    "zero1": ParallelConfig(dp_shard=2, zero=1),
}
TARGET = 1.15
"""For the styles of tensor parallelism, eager."""
HEAD = 32


class Blocks(nn.Module):
    """The blocks of a decoder, by their own names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = model.get_submodule("decoder.layers")

    def forward(self, x_BTD: Tensor, layout: SequenceLayout) -> Tensor:
        for depth, block in enumerate(self.decoder.layers.values()):
            x_BTD = block(x_BTD, layout.at_layer(depth, 0.0), None, None, None)
        return x_BTD


def model_config(width: int, layers: int, parts: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        d_model=width,
        n_layers=layers,
        n_heads=width // HEAD // parts,
        head_dim=HEAD,
        d_ff=8 * width // 3 // 16 * 16 // parts,
    )


def blocks_of(width: int, layers: int, parallel: ParallelConfig, parts: int) -> tuple[Blocks, DataParallel]:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with torch.device("meta"):
        model = build(model_config(width, layers, parts))
    layout = lay(model, PLANS.get("decoder"), mesh, sequence_parallel=parallel.sequence_parallel)
    sharing = Sharing(parallel.zero, parallel.accumulate)
    blocks = Blocks(model)
    data = share([blocks], layout, mesh, sharing, PRECISIONS["fp32"], torch.device("cpu"))
    for block in data.local.values():
        nn.init.normal_(block, std=0.02)
    return blocks, data


def passes(
    blocks: nn.Module, data: DataParallel | None, width: int, tokens: int, held: int
) -> Callable[[], None]:
    """One forward and backward pass of a row; held: of its tokens, those that are here between blocks."""
    layout = SequenceLayout(torch.arange(tokens)[None], None)
    x_BTD = torch.randn(1, held, width, requires_grad=True)

    def run() -> None:
        if data:
            data.begin(last=True)
        blocks(x_BTD, layout).sum().backward()
        if data:
            data.reduce()
            data.zero_grad()
        else:
            blocks.zero_grad(set_to_none=True)

    return run


def plain_blocks(width: int, layers: int, parts: int) -> Blocks:
    """Without any layout."""
    blocks = Blocks(build(model_config(width, layers, parts)))
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    return blocks


def seconds(run: Callable[[], None], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


def compare(name: str, width: int, args: argparse.Namespace) -> str:
    """A row of the table."""
    parallel = LAYOUTS[name]
    blocks, data = blocks_of(width, args.layers, parallel, 1)
    held = args.tokens // (parallel.tp if parallel.sequence_parallel else 1)
    ours = passes(blocks, data, width, args.tokens, held)
    plain = plain_blocks(width, args.layers, parallel.tp)
    theirs = passes(plain, None, width, args.tokens, args.tokens)
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with Traffic({str(mesh.group(axis).group_name): axis for axis in AXES}) as traffic:
        ours()
    theirs()
    pairs = [(seconds(ours, args.times), seconds(theirs, args.times)) for _ in range(args.rounds)]
    ratio = statistics.median(one / other for one, other in pairs)
    each = statistics.median(one - other for one, other in pairs) / args.layers
    sent = sum(flow.sent_bytes for flow in traffic.flows())
    plain_time = statistics.median(other for _, other in pairs) / args.layers
    return (
        f"| {name} | {width} | {1e3 * plain_time:.2f} | {1e3 * each:+.2f} | {ratio:.2f} | "
        f"{sum(f.calls for f in traffic.flows())} | {sent / 1e6:.2f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what the arguments ask for; print a table, and write it where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--times", type=int, default=5, help="passes in a round")
    parser.add_argument("--out", type=Path, help="folder for DATE-parallel.md")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    lines = [
        f"# Blocks under a layout, {date.today().isoformat()}",
        "",
        f"torch {torch.__version__}, one thread of {os.cpu_count()} cores, float32, eager, {args.layers} blocks, "
        f"a row of {args.tokens} tokens,",
        f"{args.rounds} rounds of {args.times} passes; `python benchmarks/parallel.py`. Communication takes no time.",
        "",
        "| Layout | Width | Plain block, ms | More, ms | Ratio | Collectives | MB sent |",
        "|---|---|---|---|---|---|---|",
    ]
    for width in args.widths:
        for name in args.layouts:
            lines.append(compare(name, width, args))
            print(lines[-1], flush=True)
    if args.out:
        path = args.out / f"{date.today().isoformat()}-parallel.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
