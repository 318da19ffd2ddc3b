"""What a pattern costs: forward and backward on a CPU, against dense causal attention, and peak memory.

    python benchmarks/attention.py --out benchmarks/results

One row of 2 heads of 64 channels. Each round runs every case once, in another order; medians of the ratios within a
round are quoted, which other work on the machine disturbs little. Peak memory is at two
lengths, beside the inputs, each in a process of its own."""

import argparse
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.layers.attention.patterns import BigBird, Chunked, Full, Longformer, Pattern, Seen, Window
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import Variant, blocks

HEADS, WIDTH, WINDOW, DOCUMENT = 2, 64, 512, 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Case = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_blocks(pattern: Pattern, length: int, document: int = 0) -> Case:
    places = torch.arange(length)[None]
    seen = Seen(pattern, SequenceMetadata(places, places // document if document else None), 0, HEADS)
    return lambda q, k, v: blocks.blocked(q, k, v, seen, None, Variant(), None)


def cases(length: int) -> dict[str, Case]:
    made: dict[str, Case] = {
        "dense": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        f"window {WINDOW}": by_blocks(Window(WINDOW - 1), length),
        f"window {WINDOW}, documents of {DOCUMENT}": by_blocks(Window(WINDOW - 1), length, DOCUMENT),
        f"full, documents of {DOCUMENT}": by_blocks(Full(causal=True), length, DOCUMENT),
        "chunked 1024": by_blocks(Chunked(1024, causal=True), length),
        "bigbird": by_blocks(BigBird(64, 3, 0, HEADS), length),
        f"longformer {WINDOW}": by_blocks(Longformer(WINDOW // 2, (0,)), length),
    }
    if length <= 4096:
        mask = Seen(Window(WINDOW - 1), SequenceMetadata(torch.arange(length)[None])).mask()
        made[f"window {WINDOW}, dense mask"] = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask
        )
    return made


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]


def seconds(case: Case, tensors: list[Tensor]) -> float:
    """Of a forward and a backward pass."""
    start = time.perf_counter()
    made = case(*tensors)
    torch.autograd.grad(made, tensors, torch.ones_like(made))
    return time.perf_counter() - start


def measure(length: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """By case, the median ratio of dense causal attention's time to its own, and its median microseconds a token."""
    tensors, made = inputs(length, dtype), cases(length)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(made), len(made)):
            took = seconds(made[name], tensors)
            if number:  # the first makes tables and allocates
                times[name].append(took)
    return {
        name: {
            "times_dense": statistics.median(d / t for d, t in zip(times["dense"], took, strict=True)),
            "us_per_token": statistics.median(took) / length * 1e6,
        }
        for name, took in times.items()
    }


def peak(name: str, length: int) -> int:
    """Bytes that a case takes at most beside its inputs, by Linux' own account, whose peak is set back before."""
    tensors, case = inputs(length, torch.float32), cases(length)[name]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _memory("VmRSS")
    seconds(case, tensors)
    return _memory("VmHWM") - before


def alone(function: Callable[[str, int], int], *arguments: object) -> int:
    """In a process of its own, which has no memory left over from another case."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", type=int, nargs=2, default=[8192, 16384], help="lengths")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    speed: dict[str, dict[int, object]] = {dtype: {} for dtype in options.dtypes}
    for dtype, length in itertools.product(options.dtypes, options.lengths):
        speed[dtype][length] = measure(length, DTYPES[dtype], options.rounds)
        print(dtype, length, json.dumps(speed[dtype][length]), file=sys.stderr, flush=True)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}",
        "rounds": options.rounds,
        "speed": speed,
        "peak_bytes": {
            name: {length: alone(peak, name, length) for length in options.memory}
            for name in cases(1024)
            if "mask" not in name
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        (options.out / f"{result['date']}-attention.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
