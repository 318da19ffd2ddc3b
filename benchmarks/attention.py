"""What a pattern costs: forward and backward on a CPU, against dense causal attention and others' layers, and memory.

    python benchmarks/attention.py --out benchmarks/results [--parts speed --dtypes float32 --only window]

One row of 2 heads of 64 channels, one thread, whose own processor time is told; freed memory is kept as `megatfm train`
keeps it. Each round runs every case once, in another order; medians of the ratios within a round are quoted, which
other work on the machine disturbs little. What a call measures is added to the results of its day, so that a table can
be made by several calls, of `--parts`, `--lengths`, `--dtypes` and `--only` (beginnings of cases' names).

speed: how many times as fast as dense attention. flat: microseconds a token at all lengths, which take turns, and their
ratio to the shortest. packed: rows of documents against one document of the same tokens. linformer, peers: see
`attention_layers.py`. memory: bytes beside the inputs at several lengths, each in a process of its own."""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attention_layers as layers
import destination
import torch
import torch.nn.functional as F
from attention_layers import HEADS, WIDTH, Case
from torch import Tensor

from megatfm.layers.attention.patterns import (
    AttentionPattern,
    BigBird,
    Chunked,
    Full,
    Longformer,
    PatternMask,
    Window,
)
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import AttentionOptions, blocks
from megatfm.train.watching.memory import keep_freed_memory

WINDOW, DOCUMENT = 512, 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASKED = 4096
"""Longer rows are not compared with a dense mask, of which there are as many numbers as pairs."""

PACKED = (1000, 250, 64, 32)
"""Tokens of documents in rows that are compared with one document."""

UNEQUAL = 16, 500
"""The shortest and the longest of documents whose lengths are drawn."""

Times = dict[str, list[float]]


def by_blocks(pattern: AttentionPattern, length: int, document: int = 0) -> Case:
    """document: tokens of each; 0: the row is one; −1: as many as are drawn."""
    places = torch.arange(length)[None]
    documents = unequal(length) if document < 0 else places // document if document else None
    seen = PatternMask(pattern, SequenceMetadata(places, documents), 0, HEADS)
    return lambda q, k, v: blocks.blocked(q, k, v, seen, None, AttentionOptions(), None)


def unequal(length: int) -> Tensor:
    """Numbers [1, length] of documents of drawn lengths."""
    drawn = torch.randint(*UNEQUAL, (length // UNEQUAL[0],), generator=torch.Generator().manual_seed(0))
    return torch.arange(len(drawn)).repeat_interleave(drawn)[None, :length]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cases(length: int) -> dict[str, Case]:
    made: dict[str, Case] = {
        "dense": dense,
        f"window {WINDOW}": by_blocks(Window(WINDOW - 1), length),
        f"window {WINDOW}, documents of {DOCUMENT}": by_blocks(Window(WINDOW - 1), length, DOCUMENT),
        f"full, documents of {DOCUMENT}": by_blocks(Full(causal=True), length, DOCUMENT),
        "chunked 1024": by_blocks(Chunked(1024, causal=True), length),
        "bigbird": by_blocks(BigBird(64, 3, 0, HEADS), length),
        f"longformer {WINDOW}": by_blocks(Longformer(WINDOW // 2, (0,)), length),
    }
    if length <= MASKED:
        mask = PatternMask(Window(WINDOW - 1), SequenceMetadata(torch.arange(length)[None])).mask()
        made[f"window {WINDOW}, dense mask"] = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask
        )
    return made


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]


def seconds(case: Case, tensors: Sequence[Tensor]) -> float:
    """Of the processor, for a forward and a backward pass; the clock's would be those of other work, too."""
    start = time.thread_time()
    made = case(*tensors)
    torch.autograd.grad(made, tensors, torch.ones_like(made))
    return time.thread_time() - start


def rounds(timed: Mapping[str, Callable[[], float]], count: int) -> Times:
    """Seconds of each, in turns, after a first round that makes tables and allocates."""
    times: Times = {name: [] for name in timed}
    for number in range(count + 1):
        for name in random.Random(number).sample(list(timed), len(timed)):
            took = timed[name]()
            if number:
                times[name].append(took)
    return times


def ratio(times: Times, over: str, under: str) -> float:
    """The median within rounds."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def speed(options: argparse.Namespace, name: str, length: int) -> dict[str, dict[str, float]]:
    """By case, the median ratio of dense causal attention's time to its own, and its median microseconds a token."""
    tensors = inputs(length, DTYPES[name])
    chosen = {key: case for key, case in cases(length).items() if key == "dense" or options.wanted(key)}
    times = rounds(
        {key: lambda case=case: seconds(case, tensors) for key, case in chosen.items()}, options.rounds
    )
    return {
        key: {
            "times_dense": ratio(times, "dense", key),
            "us_per_token": statistics.median(took) / length * 1e6,
        }
        for key, took in times.items()
    }


def flat(options: argparse.Namespace, name: str, case: str) -> dict[str, dict[str, float]]:
    """By length, microseconds a token and their median ratio to those of the shortest."""
    timed = {}
    for length in options.lengths:
        made = (
            layers.linformer(length, DTYPES[name])
            if case == "linformer 128"
            else (cases(length)[case], inputs(length, DTYPES[name]))
        )
        timed[str(length)] = lambda made=made: seconds(*made)
    times, shortest = rounds(timed, options.rounds), str(options.lengths[0])
    return {
        key: {
            "us_per_token": statistics.median(took) / int(key) * 1e6,
            "of_the_shortest": ratio(times, key, shortest) * int(shortest) / int(key),
        }
        for key, took in times.items()
    }


def packed(options: argparse.Namespace, name: str, length: int) -> dict[str, float]:
    """How many times as fast as one document of all tokens rows of documents are, full and in a window."""
    tensors, found = inputs(length, DTYPES[name]), {}
    for key, pattern in (("full", Full(causal=True)), (f"window {WINDOW}", Window(WINDOW - 1))):
        if options.wanted(key):
            one = dense if key == "full" else by_blocks(pattern, length)
            chosen = {"one": one, **{str(n): by_blocks(pattern, length, n) for n in PACKED}}
            chosen["{} to {}".format(*UNEQUAL)] = by_blocks(pattern, length, -1)
            timed = {n: lambda case=case: seconds(case, tensors) for n, case in chosen.items()}
            times = rounds(timed, options.rounds)
            found |= {f"{key}, documents of {n}": ratio(times, "one", n) for n in chosen if n != "one"}
    return found


def peak(name: str, length: int) -> int:
    """Bytes that a case takes at most beside its inputs, by Linux' own account, whose peak is set back before."""
    torch.set_num_threads(1)
    case, tensors = layers.of_memory(name, length) or (cases(length)[name], inputs(length, torch.float32))
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


def measured(options: argparse.Namespace) -> Iterator[tuple[list[str], Any]]:
    """Where in the results each figure belongs, and the figures."""
    for part in options.parts:
        if part == "memory":
            for name in (*cases(MASKED), *layers.OF_MEMORY):
                for length in options.lengths if options.wanted(name) else ():
                    if "mask" not in name or length <= MASKED:
                        yield [part, name, str(length)], alone(peak, name, length)
            continue
        for dtype in options.dtypes:
            if part == "flat":
                for name in (f"window {WINDOW}", "bigbird", f"longformer {WINDOW}", "linformer 128"):
                    if options.wanted(name):
                        yield [part, dtype, name], flat(options, dtype, name)
            for length in options.lengths if part in ("speed", "packed") else ():
                yield (
                    [part, dtype, str(length)],
                    {"speed": speed, "packed": packed}[part](options, dtype, length),
                )
            for length in options.lengths if part in ("linformer", "peers") else ():
                made = layers.compared(part, length, DTYPES[dtype])
                chosen = {key: one for key, one in made.items() if options.wanted(key)}
                times = rounds(
                    {key: lambda one=one: seconds(*one) for key, one in chosen.items()}, options.rounds
                )
                against = (
                    {key: key.removeprefix("transformers' ") for key in times} if part == "peers" else {}
                )
                yield (
                    [part, dtype, str(length)],
                    {
                        f"{key} / {against.get(key, 'linformer 128')}": ratio(
                            times, key, against.get(key, "linformer 128")
                        )
                        for key in times
                        if key != against.get(key, "linformer 128")
                    },
                )


def keep(path: Path, where: Sequence[str], found: Any) -> None:
    """Add figures to the results of the day."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    place = kept
    for key in where[:-1]:
        place = place.setdefault(key, {})
    old = place.get(where[-1])
    place[where[-1]] = {**old, **found} if isinstance(old, dict) else found
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["speed", "flat", "packed", "linformer", "peers", "memory"]
    parser.add_argument("--out", type=destination.folder)
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    options.wanted = lambda name: any(name.startswith(only) for only in options.only)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory()
    for where, found in measured(options):
        print(*where, json.dumps(found), file=sys.stderr, flush=True)
        if options.out:
            path = options.out / f"{date.today().isoformat()}-attention.json"
            keep(path, ["machine"], f"{layers.cpu()}, 1 thread, torch {torch.__version__}")
            keep(path, ["rounds", where[0]], options.rounds)
            keep(path, where, found)


if __name__ == "__main__":
    main()
