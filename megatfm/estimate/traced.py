"""Compares an estimate with a rank that takes real steps on the imaginary GPU, in a separate process."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.estimator import Estimate
from megatfm.estimate.traffic import Axis, join_axes, make_axes
from megatfm.parallel.mesh import EXPERT, EXPERT_SHARD

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


def count_traced_microbatches(estimate: Estimate) -> int:
    """Return a number of micro-batches beyond which memory grows no more.

    One more than a pipeline holds, as those after the first have its gradients. Without one, two if each reduces its
    gradients and frees its weights; else three: the first has no gradients yet, and the last frees what it has reduced.
    """
    parallel = estimate.config.parallel
    if parallel.pp > 1:
        enough = parallel.pp + 1 if parallel.pp_schedule == "1f1b" else 2 * parallel.pp * parallel.stages_per_rank
    else:
        enough = 2 if parallel.zero == 3 and parallel.grad_accumulation == "sharded" else 3
    return min(estimate.microbatches, enough)


def make_trace_overrides(config: Config, microbatches: int) -> list[str]:
    """Return the overrides of a trace and of its estimate: few micro-batches."""
    rows = microbatches * config.train.micro_batch * config.parallel.dp_shard * config.parallel.dp_replicate
    return [f"train.global_batch={rows}", f"parallel.dp_shard={config.parallel.dp_shard}"]


def check_rank(rank: int, gpus: int) -> None:
    """Raise UsageError for a rank that does not exist."""
    if not 0 <= rank < gpus:
        raise UsageError(f"--rank {rank}: there are ranks 0 to {gpus - 1}")


def run_trace(source: str, overrides: Sequence[str], gpus: int, rank: int) -> Traced:
    """Trace one rank. Raises UsageError for a rank that does not exist, MegatfmError with the reason if it fails."""
    check_rank(rank, gpus)
    command = [sys.executable, "-m", "megatfm.imaginary", source, "--world", str(gpus), "--rank", str(rank)]
    command += ["--steps", "2"]  # the first one makes the state of the optimizer
    try:
        process = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise MegatfmError(f"the traced rank took longer than {TIMEOUT} s: trace fewer layers") from None
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise MegatfmError(f"the traced rank ended with {process.returncode}: {lines[-1].removeprefix('error: ')}")
    return Traced(json.loads(process.stdout.strip().splitlines()[-1]))


def compare_with_trace(estimate: Estimate, traced: Traced) -> list[tuple[str, int, int]]:
    """Return (name, modelled bytes, traced bytes) of memory, and of each flow of a mebibyte or more.

    Of a traced block's own activations, its output counts in place of its input.
    """
    pipeline_rank = int(traced.facts["rank"]) * estimate.config.parallel.pp // estimate.cluster.gpus
    rank, flows = estimate.memory[pipeline_rank], estimate.flows_by_rank[pipeline_rank]
    modelled = rank.total - rank.reserved
    pairs = [("stored weights", rank.weights, traced.facts["weights"]), ("peak", modelled, traced.peak)]
    pairs.append(("saved by blocks", rank.saved_in_blocks, sum(traced.facts["saved"].values())))
    axes, modelled_sent = make_axes(estimate.config.parallel), Counter[tuple[str, str]]()
    for axis, collective in flows.sent:
        key = name_traced_axis(axis, axes), collective
        modelled_sent[key] += flows.get_sent_bytes((axis, collective), traced.facts["rank"], axes)
    for key in sorted({*modelled_sent, *traced.sent}):
        sent, traced_sent = modelled_sent[key], traced.sent.get(key, 0)
        if max(sent, traced_sent) >= 1 << 20:
            pairs.append((" ".join(key), sent, traced_sent))
    return pairs


def name_traced_axis(name: str, axes: Mapping[str, Axis]) -> str:
    """Return the name under which a trace counts the traffic of an axis, or of joint axes.

    If `ep` covers all ranks of one axis, they share a process group, named by that axis; a group over several axes with
    the ranks of `ep` is named `ep`.
    """
    expert = axes[EXPERT]
    if expert.size == 1 or axes[EXPERT_SHARD].size > 1:
        return name
    if name == EXPERT:
        same = (axis.name for axis in axes.values() if (axis.size, axis.stride) == (expert.size, expert.stride))
        return next((axis for axis in same if axis != EXPERT), EXPERT)
    joint = join_axes(axes[part] for part in name.split(" × "))
    return EXPERT if " × " in name and (joint.size, joint.stride) == (expert.size, expert.stride) else name
