"""Training on one GPU: the speed of decoders' steps, and a real run that is stopped and goes on.

    python benchmarks/gpu_training.py steps --case 124m --out benchmarks/results
    python benchmarks/gpu_training.py run --out benchmarks/results

steps: 124M, 350M, 1.3B and 6.7B parameters, bfloat16, AdamW, compiled blocks. Random tokens: a step costs the same with
any tokens; a row is one document, or packed with documents of 256 tokens as the loader packs them. "Wanted" was written
before a GPU was there. MFU is FLOPs of the model, none of what is computed again, over what the GPU could do: 6N +
12Lhs a token with the whole attention matrix, 6N + 6Lhs with the half that a causal model needs.

run: a corpus, training, a stop by a signal with a save, a resume, and the same run never stopped, by the commands that
a user types. Losses and gradient norms of both runs are compared to the bit.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.describe.description import describe
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import get_memory_bytes

# ----------------------------------------------------------------------------------------------------- steps

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
    def sizes(self) -> str:
        """Format cells: tokens of a row, rows, and settings that differ from the defaults of this script."""
        settings = [word.removeprefix("train.") for word in self.overrides if word not in DENSE]
        how = ", ".join([*settings, *["packed"] * self.packed, *["eager"] * self.eager])
        return f"{self.length:,} | {self.rows} | {how}"

    @property
    def target(self) -> str:
        return "" if self.target_tokens_per_second is None else f"{self.target_tokens_per_second:,}"


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
    *("model.d_model=32", "model.n_layers=2", "model.attention.n_heads=4", "model.ffn.d_ff=64"),
    "model.vocab_size=300",
]


def load_case(case: Case, *, tiny: bool) -> Config:
    """Load the preset with the sizes of rows and batch, no dropout, and one data rank."""
    sizes = [f"model.position.max_positions={case.length}", f"data.sequence_length={case.length}"]
    is_compiled = str(not (case.eager or tiny)).lower()
    batch = [f"train.{size}={case.rows}" for size in ("micro_batch", "global_batch")] + [f"train.compile={is_compiled}"]
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


def measure(case: Case, device: torch.device, steps: int, *, tiny: bool) -> str:
    """Measure `steps` steps after three to warm up; return the line of the table with their median."""
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
    flops_a_token = description.flops_full, description.flops_causal
    cells = (
        f"{rate:,.0f}",
        case.target,
        f"{get_memory_bytes(device) / 1e9:.2f}",
        *("–" if peak is None else f"{100 * rate * flops / peak:.1f} %" for flops in flops_a_token),
    )
    return f"| {case.preset} | {description.parameters:,} | {case.sizes} | {' | '.join(cells)} |"


@common.argument("--case", choices=CASES, nargs="+", default=["124m", "1.3b"])
@common.argument("--steps", type=int, default=10)
@common.argument("--tiny", action="store_true", help="a shrunk model on the CPU: does the script work?")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-gpu-CASE.md")
def run_steps(args: argparse.Namespace) -> int:
    """Write a table for each size; a case that fails has its error in its line, and the result is then 1."""
    device = torch.device("cpu" if args.tiny else "cuda")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo" if args.tiny else "nccl", store=store, rank=0, world_size=1)
    failed = 0
    for title in args.case:
        page = common.Page(
            common.make_dated_path(args.out, f"gpu-{title}.md"),
            f"Decoders on one GPU: {title}",
            f"{common.get_device_name(device.type)}, torch {torch.__version__}, bfloat16, AdamW; `python "
            f"benchmarks/gpu_training.py steps --case {title}`.",
            table=(
                "| Model | Parameters | Tokens a row | Rows | How | Tokens a second | Wanted | Peak memory, GB | "
                "MFU 6N + 12Lhs | 6N + 6Lhs |"
            ),
        )
        for case in TINY if args.tiny else CASES[title]:
            try:
                page.add(measure(case, device, args.steps, tiny=args.tiny))
            except Exception as error:
                page.add(f"| {case.preset} | | {case.sizes} | {common.format_error(error)} | {case.target} | | | |")
                failed = 1
            torch._dynamo.reset()
    return failed


# ------------------------------------------------------------------------------------------------------- run

SHRUNK_RUN = ["model.d_model=64", "model.ffn.d_ff=128", "model.n_layers=2", "train.compile=false"]
SIZED_RUN = ["model.d_model=768", "model.ffn.d_ff=2048", "model.n_layers=12", "model.attention.n_heads=12"]


class Stages:
    """Runs commands of megatfm in a folder, and writes their outcomes to a page."""

    def __init__(self, folder: Path, result: Path | None) -> None:
        self.folder, self.failed = folder, False
        device = common.get_device_name("cuda" if torch.cuda.is_available() else "cpu")
        self.page = common.Page(
            result,
            "A run, a stop, a resume",
            f"{device}, torch {torch.__version__}; `python benchmarks/gpu_training.py run`.",
            table="| Stage | Expected | Outcome | Seconds |",
        )

    def add_row(self, stage: str, expected: str, outcome: str, seconds: float, *, right: bool) -> None:
        self.failed = self.failed or not right
        marked = outcome if right else f"**{outcome}**"
        self.page.add(f"| {stage} | {expected} | {marked} | {seconds:.0f} |")

    def run(self, stage: str, words: list[str], expected: int = 0, stop: tuple[Path, int] | None = None) -> None:
        """Run a command. stop: run directory, and the step after which to stop it by SIGTERM."""
        start, log = time.monotonic(), self.folder / "log.txt"
        with open(log, "wb") as output:
            command = [sys.executable, "-m", "megatfm", *words]
            process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT)
            while stop and process.poll() is None:
                if len(read_losses(stop[0])) >= stop[1]:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.1)
            code = process.wait()
        last = log.read_text(errors="replace").strip().rpartition("\n")[2][:160].replace("|", "/")
        right = code == expected
        outcome = f"exit {code}" + ("" if right else f": {last}")
        self.add_row(stage, f"exit {expected}", outcome, time.monotonic() - start, right=right)


def read_losses(run: Path) -> dict[int, str]:
    """Return step → loss and gradient norm, as text, from metrics.jsonl."""
    path = run / "metrics.jsonl"
    complete_lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records = (json.loads(line) for line in complete_lines if line)
    return {line["step"]: repr((line["loss"], line["grad_norm"])) for line in records if "loss" in line}


@common.argument("--tiny", action="store_true", help="a shrunk model on the CPU: does the script work?")
@common.argument("--steps", type=int, default=120)
@common.argument("--text", type=Path, help="a folder of text instead of Python's own sources")
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-gpu-run.md")
def run_stages(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    result = common.make_dated_path(args.out and args.out.resolve(), "gpu-run.md")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = Stages(folder, result)
        text = [f"read.folder={args.text.resolve()}"] if args.text else ["split.validation=0.02"]
        stages.run("prepare the corpus", ["prep", "quickstart-data", *text])
        settings = [f"train.steps={args.steps}", "log.every=1", "lr_schedule.warmup_steps=10", "evaluate.every=0"]
        train = ["train", "quickstart", *(SHRUNK_RUN if args.tiny else SIZED_RUN), *settings]
        stages.run("train: whole", [*train, "name=whole"])
        stages.run("train: stopped", [*train, "name=stopped"], 75, (folder / "runs" / "stopped", args.steps // 2))
        stages.run("resume", [*train, "name=stopped"])
        uninterrupted, stopped = read_losses(folder / "runs/whole"), read_losses(folder / "runs/stopped")
        differ = [step for step in range(1, args.steps + 1) if uninterrupted.get(step, 0) != stopped.get(step, 1)]
        outcome = f"all {args.steps} alike" if not differ else f"{len(differ)} differ, from step {differ[0]} on"
        stages.add_row("losses and norms, to the bit", "all alike", outcome, 0, right=not differ)
        stages.run("generate", ["generate", "runs/stopped", "--prompt", "def ", "--max-tokens", "40"])
    return int(stages.failed)


PARTS = {"steps": run_steps, "run": run_stages}

if __name__ == "__main__":
    sys.exit(common.run_part(__doc__, PARTS))
