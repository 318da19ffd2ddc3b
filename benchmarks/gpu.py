"""Training steps of decoders on one GPU: tokens a second, peak memory, and MFU by both conventions.

    python benchmarks/gpu.py --out benchmarks/results

124M and 1.3B parameters, rows of 1,024 and 2,048 tokens, bfloat16, AdamW, compiled blocks. Random tokens: a step costs
the same whatever they are. MFU is FLOPs of the model, none of what is computed again, over what the GPU could do: 6N +
12Lhs a token with the whole attention matrix, 6N + 6Lhs with the half that a causal model needs.
"""

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.describe.description import describe
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.watching.memory import memory_bytes

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Of dense bfloat16 products, from NVIDIA's data sheets (SXM)."""
CASES = [("gpt2-124m", 1024, 16), ("gpt2-124m", 2048, 8), ("gpt3-xl", 1024, 8), ("gpt3-xl", 2048, 4)]
"""Preset, tokens in a row, rows."""
TINY = [("gpt2-124m", 64, 2)]
SHRUNK = [
    "model.d_model=32",
    "model.n_layers=2",
    "model.attention.n_heads=4",
    "model.ffn.d_ff=64",
    "model.vocab_size=300",
]


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    model: str
    length: int
    rows: int
    parameters: int
    tokens_per_second: float
    memory: float
    mfu: tuple[float, float] | None

    def text(self) -> str:
        mfu = "– | –" if self.mfu is None else " | ".join(f"{100 * share:.1f} %" for share in self.mfu)
        return (
            f"| {self.model} | {self.parameters:,} | {self.length:,} | {self.rows} | {self.tokens_per_second:,.0f} | "
            f"{self.memory / 1e9:.2f} | {mfu} |"
        )


def config_of(preset: str, length: int, rows: int, *, tiny: bool, compiled: bool) -> Config:
    sizes = [f"model.position.max_positions={length}", f"data.sequence_length={length}"]
    batch = [
        f"train.micro_batch={rows}",
        f"train.global_batch={rows}",
        f"train.compile={str(compiled).lower()}",
    ]
    plain = ["model.dropout=0", "model.attention.dropout=0", "parallel.dp_shard=1"]
    return load_config(preset, [*sizes, *batch, *plain, *(SHRUNK if tiny else [])])


def measure(config: Config, device: torch.device, steps: int) -> Row:
    """The median of some steps, after three that compile and fill caches."""
    mesh = build_mesh(config.parallel, 1, device.type)
    engine = build_engine(config, mesh, device, "bf16")
    length, rows = config.data.sequence_length, config.train.micro_batch
    vocabulary = config.model.vocab_size or 0
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    objective = Causal(SpecialTokens(bos=1, eos=2, pad=0))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(3 + steps):
        start = time.perf_counter()
        engine.forward_backward([batch], objective)
        engine.step(1e-4, clip=1.0)  # reads the norm, and so waits for the GPU
        if step >= 3:
            seconds.append(time.perf_counter() - start)
    rate = rows * length / statistics.median(seconds)
    found = describe(config)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
    mfu = None if peak is None else (rate * found.flops_full / peak, rate * found.flops_causal / peak)
    return Row(config.name, length, rows, found.parameters, rate, memory_bytes(device), mfu)


def report(lines: list[str], device: torch.device) -> str:
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "a CPU"
    headings = ("Model", "Parameters", "Tokens a row", "Rows", "Tokens a second", "Peak memory, GB")
    return "\n".join(
        [
            f"# Decoders on one GPU, {date.today().isoformat()}",
            "",
            f"{where}, torch {torch.__version__}, bfloat16, AdamW; `python benchmarks/gpu.py`.",
            "",
            f"| {' | '.join(headings)} | MFU 6N + 12Lhs | 6N + 6Lhs |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; print a table, and write it where asked to, anew after each case.

    A case that fails has its error in its line, and the others are measured; the result is then 1, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--tiny", action="store_true", help="a shrunk model on the CPU: does the script work?"
    )
    parser.add_argument("--eager", action="store_true", help="don't compile")
    parser.add_argument("--out", type=Path, help="folder for DATE-gpu.md")
    args = parser.parse_args(arguments)
    device = torch.device("cpu" if args.tiny else "cuda")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo" if args.tiny else "nccl", store=store, rank=0, world_size=1)
    lines, failed = [], 0
    for preset, length, n_rows in TINY if args.tiny else CASES:
        config = config_of(preset, length, n_rows, tiny=args.tiny, compiled=not (args.eager or args.tiny))
        try:
            lines.append(measure(config, device, args.steps).text())
        except Exception as error:
            first = str(error).partition("\n")[0].replace("|", "/")[:200]
            lines.append(f"| {preset} | | {length:,} | {n_rows} | {type(error).__name__}: {first} | | | |")
            failed = 1
        print(lines[-1], flush=True)
        torch._dynamo.reset()
        if args.out:
            path = args.out / f"{date.today().isoformat()}-gpu.md"
            path.write_text(report(lines, device), encoding="utf-8")
    print(f"\n{report(lines, device)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
