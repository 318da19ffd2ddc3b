"""Traces one rank's real steps on the imaginary GPU: memory by phase, traffic, kernels, and host waits.

    python -m megatfm.imaginary CONFIG --world 1024 --rank 5 key=value

It runs in a separate process, as the guard must be loaded before torch.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass
class Trace:
    """Record of a rank's last step.

    Bytes on the device: built, with the engine alone; passes, optimizer: their peaks; at_rest: after the step. at_peak:
    owner (see `Ledger`) → bytes at the peak. saved: block → bytes of activations that its forward passes of a
    micro-batch left, its outputs among them. sent: [axis, collective, calls, bytes]. waits, copies: line of code →
    times; all_pairs: tensors of all pairs of tokens → times. is_compiled: whether blocks are; graph_breaks,
    recompilations: line and reason → times, in all steps.
    """

    config: str
    rank: int
    world: int
    layout: str
    microbatches: int
    is_compiled: bool = False
    weights: int = 0
    built: int = 0
    passes: int = 0
    optimizer: int = 0
    at_rest: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    sent: list[tuple[str, str, int, int]] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    all_pairs: dict[str, int] = field(default_factory=dict)
    graph_breaks: dict[str, int] = field(default_factory=dict)
    recompilations: dict[str, int] = field(default_factory=dict)
    largest: str = ""
    seconds: float = 0.0


def trace(source: str, overrides: Sequence[str], world: int, rank: int, steps: int, microbatches: int | None) -> Trace:
    """Take steps as one rank of `world`. microbatches: at most so many in a step; None: as many as the config has.

    Raises UsageError for an invalid config or layout, and the engine's errors.
    """
    from megatfm.imaginary.device import CUDA, ImaginaryGPU, install_torch_stubs

    install_torch_stubs("NVIDIA H100 80GB HBM3", (9, 0))
    import torch.distributed as dist
    from torch._dynamo.exc import TorchDynamoException
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatfm.config import load_config
    from megatfm.errors import MegatfmError
    from megatfm.imaginary.kernels import compile_without_code, replace_fused_attention
    from megatfm.imaginary.step import make_batches, take_steps
    from megatfm.parallel.mesh import build_mesh
    from megatfm.registry import import_plugins
    from megatfm.train.build import build_engine

    start = time.perf_counter()
    config = load_config(source, overrides)
    import_plugins(config.plugins)
    precision = "bf16" if config.train.precision == "auto" else config.train.precision
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    mesh = build_mesh(config.parallel, world, "cuda")
    gpu = ImaginaryGPU()
    with gpu, compile_without_code(gpu), replace_fused_attention():
        engine = build_engine(config, mesh, CUDA, precision)
        batches = make_batches(config, mesh.data_ranks, microbatches)
        record = Trace(config.name, rank, world, mesh.describe(), len(batches), built=gpu.memory.live_bytes)
        record.weights = sum(block.tensor.nbytes for block in engine.weights().values())
        try:
            take_steps(config, engine, gpu, batches, steps, record)
        except TorchDynamoException as error:
            reason = str(error).partition("\n")[0]
            raise MegatfmError(
                f"a block can't be compiled: {reason}: trace eager ones by train.compile=false"
            ) from error
    record.seconds = time.perf_counter() - start
    return record


def main(argv: Sequence[str]) -> int:
    """Trace a rank and print the record as JSON; return the exit code."""
    from megatfm.errors import MegatfmError
    from megatfm.imaginary.guard import load_guard

    parser = argparse.ArgumentParser(prog="python -m megatfm.imaginary", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--microbatches", type=int)
    args = parser.parse_intermixed_args(argv)
    if args.steps < 1 or not 0 <= args.rank < args.world:
        parser.error(f"--steps must be 1 or more, and --rank one of 0 to {args.world - 1}, as --world is {args.world}")
    try:
        load_guard()
        record = trace(args.config, args.overrides, args.world, args.rank, args.steps, args.microbatches)
    except MegatfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(record)))
    return 0
