"""Compares an estimate with a rank that takes real steps on the imaginary GPU, in a separate process."""

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

TIMEOUT = 1800
"""Seconds after which a trace is stopped."""


@dataclass(frozen=True)
class Traced:
    """Trace of a rank. facts: JSON that `megatfm.imaginary` prints (see `megatfm.imaginary.trace.Trace`)."""

    facts: Mapping[str, Any]

    @property
    def peak(self) -> int:
        """Most bytes on the device at once, in passes or optimizer."""
        return max(self.facts["passes"], self.facts["optimizer"])

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes by (axis, collective)."""
        return {(axis, name): n_bytes for axis, name, _, n_bytes in self.facts["sent"]}


def enough_microbatches(estimate: Estimate) -> int:
    """Return a number of micro-batches beyond which memory grows no more: as many as a pipeline holds, else two."""
    parallel = estimate.config.parallel
    enough = 2 * parallel.pp * parallel.stages_per_rank if parallel.pp > 1 else 2
    return min(estimate.microbatches, enough)


def overrides_of(config: Config, gpus: int, microbatches: int) -> list[str]:
    """Return the overrides of a trace and of its estimate: few micro-batches, no compilation."""
    rows = microbatches * config.train.micro_batch * config.parallel.dp_shard * config.parallel.dp_replicate
    return [
        f"train.global_batch={rows}",
        "train.compile=false",
        f"parallel.dp_shard={config.parallel.dp_shard}",
    ]


def run_trace(source: str, overrides: Sequence[str], gpus: int, rank: int) -> Traced:
    """Trace one rank. Raises UsageError for a rank that does not exist, MegatfmError with the reason if it fails."""
    if not 0 <= rank < gpus:
        raise UsageError(f"--rank {rank}: there are ranks 0 to {gpus - 1}")
    command = [sys.executable, "-m", "megatfm.imaginary", source, "--world", str(gpus), "--rank", str(rank)]
    command += ["--steps", "2"]  # the first one makes the state of the optimizer
    try:
        process = subprocess.run(
            [*command, *overrides], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise MegatfmError(f"the traced rank took longer than {TIMEOUT} s: trace fewer layers") from None
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise MegatfmError(
            f"the traced rank ended with {process.returncode}: {lines[-1].removeprefix('error: ')}"
        )
    return Traced(json.loads(process.stdout.strip().splitlines()[-1]))


def differences(estimate: Estimate, traced: Traced) -> list[tuple[str, int, int]]:
    """Return (name, modelled bytes, traced bytes) of memory, and of each flow of a mebibyte or more."""
    pipeline_rank = _pipeline_rank(estimate, traced)
    rank, flows = estimate.memory[pipeline_rank], estimate.flows_by_rank[pipeline_rank]
    modelled = rank.total - rank.reserved
    pairs = [("stored weights", rank.weights, traced.facts["weights"]), ("peak", modelled, traced.peak)]
    axes = axes_of(estimate.config.parallel)
    for key in sorted({*flows.sent, *traced.sent}):
        sent, traced_sent = flows.of_rank(key, traced.facts["rank"], axes), traced.sent.get(key, 0)
        if max(sent, traced_sent) >= 1 << 20:
            pairs.append((" ".join(key), sent, traced_sent))
    return pairs


def _pipeline_rank(estimate: Estimate, traced: Traced) -> int:
    return int(traced.facts["rank"]) * estimate.config.parallel.pp // estimate.cluster.gpus
