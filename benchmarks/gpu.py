"""Training steps of decoders on one GPU: tokens a second, peak memory, and MFU by both conventions.

    python benchmarks/gpu.py --case 124m --out benchmarks/results

124M, 350M, 1.3B and 6.7B parameters, bfloat16, AdamW, compiled blocks. Random tokens: a step costs the same with
any tokens; a row is one document, or packed with documents of 256 tokens as the loader packs them. "Wanted" was written
before a GPU was there. MFU is FLOPs of the model, none of what is computed again, over what the GPU could do: 6N +
12Lhs a token with the whole attention matrix, 6N + 6Lhs with the half that a causal model needs.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.describe.description import describe
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import memory_bytes

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""FLOPs a second of dense bfloat16 products, from NVIDIA's data sheets (SXM)."""


@dataclass(frozen=True)
class Case:
    """target_tokens_per_second: tokens a second on an H100 or H200."""

    preset: str
    length: int
    rows: int
    overrides: tuple[str, ...] = ()
    packed: bool = False
    eager: bool = False
    target_tokens_per_second: int | None = None

    @property
    def how(self) -> str:
        """Settings that differ from the defaults of this script."""
        settings = [word.removeprefix("train.") for word in self.overrides if word not in DENSE]
        return ", ".join([*settings, *["packed"] * self.packed, *["eager"] * self.eager])


DENSE = ('model.layer_types=["dense"]', "~model.layer_type.banded")
CASES = {
    "124m": [
        Case("gpt2-124m", 1024, 16, target_tokens_per_second=505_000),
        Case("gpt2-124m", 1024, 32, target_tokens_per_second=530_000),
        Case("gpt2-124m", 1024, 16, packed=True, target_tokens_per_second=500_000),
        Case("gpt2-124m", 1024, 16, eager=True),
    ],
    "350m": [Case("gpt2-355m", 1024, 16, target_tokens_per_second=170_000), Case("gpt2-355m", 1024, 32)],
    "1.3b": [
        Case("gpt3-xl", 2048, 8, DENSE, target_tokens_per_second=63_000),
        Case("gpt3-xl", 2048, 16, (*DENSE, "train.recompute=selective"), target_tokens_per_second=60_000),
        Case("gpt3-xl", 2048, 8, DENSE, packed=True, target_tokens_per_second=63_000),
    ],
    "fp8": [
        Case("gpt3-xl", 2048, 8, DENSE, target_tokens_per_second=63_000),
        Case("gpt3-xl", 2048, 8, (*DENSE, "train.precision=fp8"), target_tokens_per_second=80_000),
        Case("gpt3-xl", 2048, 8, (*DENSE, "train.precision=fp8-tensorwise"), target_tokens_per_second=80_000),
    ],
    "6.7b": [
        Case("gpt3-6.7b", 2048, 4, (*DENSE, "train.recompute=full"), target_tokens_per_second=15_000),
        Case("gpt3-6.7b", 2048, 8, (*DENSE, "train.recompute=full"), target_tokens_per_second=15_000),
        Case("gpt3-6.7b", 2048, 8, (*DENSE, "train.recompute=full", "optimizer.moments_dtype=bf16")),
    ],
}
TINY = [Case("gpt2-124m", 64, 2, target_tokens_per_second=1), Case("gpt2-124m", 64, 2, packed=True)]
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

    case: Case
    parameters: int
    tokens_per_second: float
    memory: float
    mfu: tuple[float, float] | None

    def format(self) -> str:
        case = self.case
        mfu = "– | –" if self.mfu is None else " | ".join(f"{100 * share:.1f} %" for share in self.mfu)
        return (
            f"| {case.preset} | {self.parameters:,} | {case.length:,} | {case.rows} | {case.how} | "
            f"{self.tokens_per_second:,.0f} | {format_target(case)} | {self.memory / 1e9:.2f} | {mfu} |"
        )


def format_target(case: Case) -> str:
    return "" if case.target_tokens_per_second is None else f"{case.target_tokens_per_second:,}"


def load_case(case: Case, *, tiny: bool) -> Config:
    """Load the preset with the sizes of rows and batch, no dropout, and one data rank."""
    sizes = [f"model.position.max_positions={case.length}", f"data.sequence_length={case.length}"]
    batch = [
        f"train.micro_batch={case.rows}",
        f"train.global_batch={case.rows}",
        f"train.compile={str(not (case.eager or tiny)).lower()}",
    ]
    plain = ["model.dropout=0", "model.attention.dropout=0", "parallel.dp_shard=1"]
    return load_config(case.preset, [*sizes, *batch, *plain, *case.overrides, *(SHRUNK if tiny else [])])


def draw_batch(case: Case, vocabulary: int) -> dict[str, Any]:
    """Draw a batch like the loader's."""
    tokens = torch.randint(0, vocabulary, (case.rows, case.length + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if case.packed:
        index = torch.arange(case.length).expand(case.rows, -1)
        size = min(256, case.length // 2)
        batch |= {"positions": index % size, "documents": index // size}
    return {name: values.numpy() for name, values in batch.items()}


def measure(case: Case, device: torch.device, steps: int, *, tiny: bool) -> Row:
    """Measure `steps` steps after three to warm up; return the row with their median."""
    config = load_case(case, tiny=tiny)
    precision = config.train.precision if config.train.precision.startswith("fp8") else "bf16"
    engine = build_engine(config, build_mesh(config.parallel, 1, device.type), device, precision)
    batch = draw_batch(case, config.model.vocab_size or 0)
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
    rate = case.rows * case.length / statistics.median(seconds)
    description = describe(config)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
    mfu = None if peak is None else (rate * description.flops_full / peak, rate * description.flops_causal / peak)
    return Row(case, description.parameters, rate, memory_bytes(device), mfu)


def format_report(title: str, lines: list[str], device: torch.device) -> str:
    where = common.get_device_name(device.type)
    headings = ("Model", "Parameters", "Tokens a row", "Rows", "How", "Tokens a second", "Wanted", "Peak memory, GB")
    return "\n".join(
        [
            f"# Decoders on one GPU: {title}, {common.today()}",
            "",
            f"{where}, torch {torch.__version__}, bfloat16, AdamW; `python benchmarks/gpu.py --case {title}`.",
            "",
            f"| {' | '.join(headings)} | MFU 6N + 12Lhs | 6N + 6Lhs |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; print a table, and write it where asked to, anew after each case.

    A case that fails has its error in its line, and the others are measured; the result is then 1, else 0.
    """
    parser = common.make_parser(__doc__)
    parser.add_argument("--case", choices=CASES, nargs="+", default=["124m", "1.3b"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a shrunk model on the CPU: does the script work?")
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-gpu-CASE.md")
    args = parser.parse_args(arguments)
    device = torch.device("cpu" if args.tiny else "cuda")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo" if args.tiny else "nccl", store=store, rank=0, world_size=1)
    failed = 0
    for title in args.case:
        lines: list[str] = []
        for case in TINY if args.tiny else CASES[title]:
            try:
                lines.append(measure(case, device, args.steps, tiny=args.tiny).format())
            except Exception as error:
                first = str(error).partition("\n")[0].replace("|", "/")[:200]
                message = f"{type(error).__name__}: {first}"
                lines.append(
                    f"| {case.preset} | | {case.length:,} | {case.rows} | {case.how} | {message} | "
                    f"{format_target(case)} | | | |"
                )
                failed = 1
            print(lines[-1], flush=True)
            torch._dynamo.reset()
            common.write_text(common.make_dated_path(args.out, f"gpu-{title}.md"), format_report(title, lines, device))
        print(f"\n{format_report(title, lines, device)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
