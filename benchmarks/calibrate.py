"""How well a calibrated table tells times: products of shapes that are not in it, and a whole step, on this machine.

    OMP_NUM_THREADS=1 python benchmarks/calibrate.py --rounds 10

Products of the table and held-out ones are measured in turns. A step of a small GPT-2 by the engine is measured in CPU
seconds, beside the estimate with a table that is measured before and after it.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.estimate.calibrate import (
    DTYPES,
    Clock,
    _matmul,
    matmul_shapes,
    measure_device,
    write_table,
)
from megatfm.estimate.devices import NODE, load_cluster
from megatfm.estimate.estimator import estimator
from megatfm.estimate.roofline import measured_rate
from megatfm.imaginary.step import batches_of
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory
from megatfm.verify.shrink import objective_for

STEP = [
    *("model.n_layers=4", "model.d_model=384", "model.attention.n_heads=6", "model.ffn.d_ff=1536"),
    *("data.sequence_length=512", "train.micro_batch=4", "train.global_batch=4", "train.device=cpu"),
    *("parallel.zero=0", "train.compile=false"),
]


def held_out(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Shapes, of multiples of 16, drawn between the smallest and the largest of the table's sizes."""
    draw, largest = (
        random.Random(seed),
        max(matmul_shapes("cpu"), key=lambda shape: shape[0] * shape[1] * shape[2]),
    )
    most, shapes = largest[0] * largest[1] * largest[2], list[tuple[int, int, int]]()
    while len(shapes) < count:
        m, n, k = (16 * round(2 ** draw.uniform(6, 11) / 16) for _ in range(3))
        if m * n * k <= most:
            shapes.append((m, n, k))
    return shapes


def products(precision: str, rounds: int, count: int) -> None:
    """Print the errors of held-out products."""
    device, known, others = torch.device("cpu"), matmul_shapes("cpu"), held_out(count, 3)
    functions = [_matmul(shape, DTYPES[precision], device) for shape in (*known, *others)]
    seconds = Clock(device).fastest(functions, rounds)
    table = [[*shape, t] for shape, t in zip(known, seconds, strict=False)]
    errors = []
    for (m, n, k), measured in zip(others, seconds[len(known) :], strict=True):
        errors.append(2 * m * n * k / measured_rate(table, m, n, k) / measured - 1)
    ordered = sorted(abs(error) for error in errors)
    worst = max(errors, key=abs)
    print(
        f"{precision}: {len(known)} products in the table, {count} held out: error "
        f"{100 * statistics.median(errors):+.1f} % in the median, "
        f"without sign {100 * statistics.median(ordered):.1f} %, "
        f"ninth decile {100 * ordered[int(0.9 * count)]:.1f} %, worst {100 * worst:+.0f} %"
    )


def step_seconds(config: Config, rounds: int) -> float:
    """CPU seconds of the engine's step, the least of several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    keep_freed_memory(device)
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), device, config.train.precision)
    objective, batches = objective_for(config), batches_of(config, 1, None)

    def step() -> None:
        engine.forward_backward(batches, objective)
        engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)

    seconds = Clock(device).fastest([step], rounds)[0]
    dist.destroy_process_group()
    return seconds


def estimated(config: Config) -> tuple[float, dict[str, float]]:
    """Seconds of the estimate with a table that is measured now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.toml"
        write_table(measure_device(torch.device("cpu"), config.train.precision), path)
        with estimator(config, load_cluster(NODE, 1, hardware=path)) as opened:
            estimate = opened.estimate(opened.base)
    return estimate.time.step, vars(estimate.time)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=40)
    args = parser.parse_args()
    for precision in DTYPES:
        products(precision, args.rounds, args.held_out)
    for precision in DTYPES:
        config = load_config("gpt2-124m", [*STEP, f"train.precision={precision}"])
        before, causes = estimated(config)
        measured = step_seconds(config, args.rounds)
        after, _ = estimated(config)
        parts = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in causes.items() if seconds > 1e-3)
        print(
            f"{precision} step: measured {1e3 * measured:.0f} ms, estimated {1e3 * before:.0f} before and "
            f"{1e3 * after:.0f} after ({100 * ((before + after) / 2 / measured - 1):+.0f} %): {parts}"
        )


if __name__ == "__main__":
    main()
