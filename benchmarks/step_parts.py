"""Cost of parts of a training step, each against the same step without it, or in another precision or with one thread.

    python benchmarks/step_parts.py initial [--threads 2] [--rounds 10]
    python benchmarks/step_parts.py newton-schulz [cpu|cuda]
    python benchmarks/step_parts.py layer-statistics --out benchmarks/results

Both sides take turns in each round; ratios are medians of those within a round.

initial: drawing initial weights by several threads, against one.
newton-schulz: Muon's iteration in bfloat16, against float32.
layer-statistics: optimizer steps with the norms of each layer, against steps without. A decoder of 12 blocks on one
process, batches of 2,048 tokens in rows of 512; eager, since outputs of compiled blocks can't be observed.
`log.layer_stats_every = N` pays the extra once in N steps.
"""

import argparse
import statistics
import time

import common
import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.layers.initialisation import Normal, TruncatedNormal, draw
from megatfm.objectives import Causal, SpecialTokens
from megatfm.optim.matrix_optimizers import newton_schulz
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine

# -------------------------------------------------------------------------------------------------- initial

FEED_FORWARD_SHAPE = (16384, 4096)
"""One matrix of a 6.7B feed-forward network."""


def time_drawing(kind: Normal | TruncatedNormal, threads: int) -> float:
    return common.time_call(lambda: draw(kind, 0, "weight", FEED_FORWARD_SHAPE, (0, 0), FEED_FORWARD_SHAPE, threads))


def add_initial(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    return run_initial


def run_initial(args: argparse.Namespace) -> None:
    for kind in (Normal(0.02), TruncatedNormal(0.02)):
        rounds = [(time_drawing(kind, 1), time_drawing(kind, args.threads)) for _ in range(args.rounds)]
        single, several = zip(*rounds, strict=True)
        ratio, rate = (
            common.compute_median_ratio(single, several),
            FEED_FORWARD_SHAPE[0] * FEED_FORWARD_SHAPE[1] / statistics.median(single),
        )
        print(f"{type(kind).__name__}: {args.threads} threads / 1: {ratio:.2f} (1: {rate / 1e6:.0f} M/s)")


# -------------------------------------------------------------------------------------------- newton-schulz

MATRIX_SHAPES = ((160, 160), (160, 640), (512, 512), (512, 2048), (1024, 1024))


def time_iteration(x: torch.Tensor, in_bf16: bool) -> float:
    """Time one orthogonalisation of a matrix."""

    def run() -> None:
        newton_schulz(x[None], in_bf16=in_bf16)
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    return common.time_call(run)


def add_newton_schulz(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("device", nargs="?", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    return run_newton_schulz


def run_newton_schulz(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in MATRIX_SHAPES:
        x = torch.randn(shape, generator=generator).to(args.device)
        time_iteration(x, True), time_iteration(x, False)
        pairs = [(time_iteration(x, True), time_iteration(x, False)) for _ in range(args.rounds)]
        bf16, full = zip(*pairs, strict=True)
        bf16_ms, full_ms = (1e3 * statistics.median(times) for times in (bf16, full))
        print(
            f"{shape[0]} × {shape[1]}: bf16 {bf16_ms:.2f} ms, float32 {full_ms:.2f} ms, "
            f"{common.compute_median_ratio(full, bf16):.2f} times as long"
        )


# ----------------------------------------------------------------------------------------- layer-statistics

LENGTH, ROWS = 512, 4


def load_model_config(width: int) -> Config:
    sizes = [f"model.d_model={width}", f"model.ffn.d_ff={4 * width}", f"model.attention.n_heads={width // 64}"]
    other_settings = ["model.dropout=0", "model.attention.dropout=0", "model.vocab_size=8192", "parallel.dp_shard=1"]
    batch = [f"data.sequence_length={LENGTH}", f"train.micro_batch={ROWS}", f"train.global_batch={ROWS}"]
    return load_config("gpt2-124m", [*sizes, *other_settings, *batch])


def time_step(engine: Engine, batch: dict[str, torch.Tensor], *, records_stats: bool) -> float:
    """Return the seconds of one optimizer step."""
    start = time.perf_counter()
    engine.forward_backward([batch], Causal(SpecialTokens(bos=1, eos=2, pad=0)), record_activations=records_stats)
    if records_stats:
        engine.layer_statistics()
    engine.step(1e-4, clip=1.0)
    return time.perf_counter() - start


def measure(width: int, rounds: int) -> list[float]:
    """Return the ratios of steps with norms to steps without, by round."""
    config = load_model_config(width)
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), "fp32")
    tokens = torch.randint(0, 8192, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    ratios = []
    for number in range(1 + rounds):
        order = common.alternate_order((False, True), number)
        seconds = {kind: time_step(engine, batch, records_stats=kind) for kind in order}
        if number:  # the first round allocates
            ratios.append(seconds[True] / seconds[False])
    return ratios


def add_layer_statistics(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-layer-statistics.md")
    return run_layer_statistics


def run_layer_statistics(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    page = common.Page(
        common.make_dated_path(args.out, "layer-statistics.md"),
        f"# What norms by layer cost, {common.today()}",
        "",
        f"`python benchmarks/step_parts.py layer-statistics`, {args.rounds} rounds, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s).",
        "",
        "| d | a step, times one without: median | quartiles | of a run with `log.layer_stats_every = 10` |",
        "|---|---|---|---|",
    )
    for width in args.widths:
        ratios = measure(width, args.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        page.add(f"| {width} | {middle:.3f} | {low:.3f} to {high:.3f} | {100 * (middle - 1) / 10:.2f} % more |")
    dist.destroy_process_group()


PARTS = {"initial": add_initial, "newton-schulz": add_newton_schulz, "layer-statistics": add_layer_statistics}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
