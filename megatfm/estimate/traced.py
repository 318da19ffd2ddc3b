"""An estimate held against a rank that takes a real step on the imaginary GPU, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.estimator import Estimate
from megatfm.estimate.traffic import axes_of

SECONDS = 1800
"""Longest time of a trace."""


@dataclass(frozen=True)
class Traced:
    """A trace, as `megatfm.imaginary` prints it, of a step of `microbatches`."""

    facts: Mapping[str, Any]

    @property
    def peak(self) -> int:
        """Most bytes of the device at once, in passes or optimizer."""
        return max(self.facts["passes"], self.facts["optimizer"])

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes by (axis, collective)."""
        return {(axis, name): n_bytes for axis, name, _, n_bytes in self.facts["sent"]}


def enough_microbatches(estimate: Estimate) -> int:
    """Micro-batches after which a step's memory grows no more: what a pipeline holds, else two."""
    parallel = estimate.config.parallel
    most = 2 * parallel.pp * parallel.stages_per_rank if parallel.pp > 1 else 2
    return min(estimate.microbatches, most)


def overrides_of(config: Config, gpus: int, microbatches: int) -> list[str]:
    """Overrides with which a config is traced, and estimated beside: few micro-batches, no compiling."""
    rows = microbatches * config.train.micro_batch * config.parallel.dp_shard * config.parallel.dp_replicate
    return [
        f"train.global_batch={rows}",
        "train.compile=false",
        f"parallel.dp_shard={config.parallel.dp_shard}",
    ]


def run_trace(source: str, overrides: Sequence[str], gpus: int, rank: int) -> Traced:
    """Trace one rank. Raises UsageError for a rank that there is not, MegatfmError with the reason where it fails."""
    if not 0 <= rank < gpus:
        raise UsageError(f"--rank {rank}: there are ranks 0 to {gpus - 1}")
    command = [sys.executable, "-m", "megatfm.imaginary", source, "--world", str(gpus), "--rank", str(rank)]
    command += ["--steps", "2"]  # the first one makes the state of the optimizer
    try:
        done = subprocess.run(
            [*command, *overrides], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise MegatfmError(f"the traced rank took longer than {SECONDS} s: trace fewer layers") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise MegatfmError(
            f"the traced rank ended with {done.returncode}: {lines[-1].removeprefix('error: ')}"
        )
    return Traced(json.loads(done.stdout.strip().splitlines()[-1]))


def differences(estimate: Estimate, traced: Traced) -> list[tuple[str, int, int]]:
    """Pair what was modelled with what was traced, in bytes: memory, then each flow that is not of a few bytes."""
    pipeline_rank = _pipeline_rank(estimate, traced)
    rank, flows = estimate.memory[pipeline_rank], estimate.flows_by_rank[pipeline_rank]
    modelled = rank.total - rank.reserved
    pairs = [("stored weights", rank.weights, traced.facts["weights"]), ("peak", modelled, traced.peak)]
    axes = axes_of(estimate.config.parallel)
    for key in sorted({*flows.sent, *traced.sent}):
        both = flows.of_rank(key, traced.facts["rank"], axes), traced.sent.get(key, 0)
        if max(both) >= 1 << 20:
            pairs.append((" ".join(key), *both))
    return pairs


def _pipeline_rank(estimate: Estimate, traced: Traced) -> int:
    return int(traced.facts["rank"]) * estimate.config.parallel.pp // estimate.cluster.gpus
