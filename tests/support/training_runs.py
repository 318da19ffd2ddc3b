"""Training in a worker process, stopped or disturbed, and what it left."""

import hashlib
import math
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.engines.interface import LossTotals
from megatfm.errors import MegatfmError
from megatfm.train.run import train
from tests.support.documentation import PLUGINS
from tests.support.files import read_lines
from tests.support.rank_processes import engine_class

MACHINE_DEPENDENT_KEYS = frozenset(
    {
        *("time", "tokens_per_second", "mfu", "mfu_causal", "step_seconds", "data_wait_seconds"),
        *("memory_bytes", "padding", "step_parts", "evaluation_seconds", "save_seconds"),
    }
)
"""Keys of metrics.jsonl whose values depend on the machine, or on rank 0's rows. A repeated step has equal others."""


def run_training(config: Config) -> int:
    """Train; returns the exit code."""
    return train(config)


def train_with_plugins(config: Config) -> int:
    """Train with the plugins of the manual's pages on the path."""
    sys.path.insert(0, str(PLUGINS))
    return train(config)


def train_until(config: Config, step: int, name: signal.Signals = signal.SIGTERM) -> int:
    """Train from the start; in the middle of that step, the last rank alone gets a signal."""
    patched, begun = engine_class(config.parallel.engine), 0
    genuine = patched.forward_backward

    def asked(*args: Any, **how: Any) -> Any:
        nonlocal begun
        begun += 1
        stats = genuine(*args, **how)
        if begun == step and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(name)
        return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, "forward_backward", asked)
        return train(config)


def training_curve(folder: Path) -> list[dict[str, Any]]:
    """Metrics that don't depend on the clock."""
    lines = read_lines(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in MACHINE_DEPENDENT_KEYS} for line in lines]


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint of step 8, the last one of the small run."""
    newest = checkpoint.find_latest(folder / "checkpoints", hashes=True)
    assert newest is not None
    assert newest.name == "step-00000008"
    return checkpoint.read_tensors(newest)


MUON_STATE = ("momentum_buffer", "exp_avg_sq")
"""State of Muon for matrices, and of AdamW for other weights."""


def assert_bitwise_equal(first: Path, second: Path, state: Sequence[str] = MUON_STATE) -> None:
    """Assert that two runs have the same curve and the same bits in their last checkpoint.

    state: last words of names of what the optimizer must have stored.
    """
    assert training_curve(first) == training_curve(second)
    a, b = final_state(first), final_state(second)
    assert a.keys() == b.keys()
    assert set(state) <= {name.rpartition(".")[2] for name in a}
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def assert_nearly_equal(first: Path, second: Path) -> None:
    """Assert that two small runs have the same losses, norms and last evaluation but for rounding."""
    lines, remaining = training_curve(first), training_curve(second)
    assert [line["step"] for line in remaining] == list(range(1, 9))
    for line, other in zip(lines, remaining, strict=True):
        assert other["tokens"] == line["tokens"]
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
    ends = [item[-1]["evaluation"]["held-out"] for item in (lines, remaining)]
    assert ends[0]["bytes"] == ends[1]["bytes"]
    assert ends[0]["bits_per_byte"] == pytest.approx(ends[1]["bits_per_byte"], rel=1e-4)


def batch_key(microbatches: Sequence[Mapping[str, Any]]) -> str:
    """A hash of a batch's tokens."""
    return hashlib.sha256(b"".join(batch["tokens"].tobytes() for batch in microbatches)).hexdigest()


def train_with_faults(config: Config, faults: Mapping[str, str] = {}) -> tuple[int | str, list[str]]:
    """Train; returns the exit code or error, and a key of each batch that was read. faults: key of a batch → fault.

    A fault is `nan` (the loss), `spike` (the loss) or `inf` (one gradient of the last rank).
    """
    patched, read = engine_class(config.parallel.engine), []
    genuine = patched.forward_backward

    def faulty(engine: Any, microbatches: Sequence[Mapping[str, Any]], objective: Any, **how: Any) -> LossTotals:
        stats = genuine(engine, microbatches, objective, **how)
        read.append(batch_key(microbatches))
        fault = faults.get(read[-1])
        if fault == "inf" and dist.get_rank() == dist.get_world_size() - 1:
            next(g for g in engine.gradients().values() if g.numel()).view(-1)[0] = math.inf
        wrong = {"nan": math.nan, "spike": 1e6}.get(fault or "", 0.0)
        for term in stats.sums:
            stats.sums[term] += wrong
        return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, "forward_backward", faulty)
        try:
            return train(config), read
        except MegatfmError as error:
            return str(error), read


def stored_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return checkpoint.read_tensors(folder / f"checkpoints/step-{step:08d}")


def have_same_tensors(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states have the same names and bits."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def run_events(folder: Path, kind: str) -> list[tuple[int, str]]:
    """Step and detail of each event of a kind."""
    return [(line["step"], line["detail"]) for line in read_lines(folder / "events.jsonl") if line["event"] == kind]


def delete_checkpoints_after(folder: Path, step: int) -> None:
    """Delete the checkpoints after a step, as if the run had been killed before it saved them."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def train_with_bit_flip(config: Config, fault: str, rank: int, step: int) -> str:
    """Train with a bit that flips on one rank; the error. fault: `gradient`, when it is computed twice, or `weight`."""
    patched = engine_class(config.parallel.engine)
    backward, optimize = patched.forward_backward, patched.step
    calls = 0

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    def forward_backward(engine: Any, *batch: Any, **how: Any) -> LossTotals:
        nonlocal calls
        calls += 1
        stats = backward(engine, *batch, **how)
        if fault == "gradient" and dist.get_rank() == rank and calls == step + 1:
            flip(engine.gradients()[last_output_projection(engine)])
        return stats

    def optimizer_step(engine: Any, *how: float, skip: bool) -> float:
        norm = optimize(engine, *how, skip=skip)
        if fault == "weight" and dist.get_rank() == rank and calls == step:
            flip(engine.local[last_output_projection(engine)])
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, "forward_backward", forward_backward)
        patch.setattr(patched, "step", optimizer_step)
        try:
            train(config)
        except MegatfmError as error:
            return str(error)
    return "none"


def last_output_projection(engine: Any) -> str:
    """Name of the last output projection of which this rank holds something."""
    return [name for name, weight in engine.local.items() if name.endswith(".wo.weight") and weight.numel()][-1]
