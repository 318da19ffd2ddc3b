"""Resilience: skipped steps, rollbacks after loss spikes, checks for silent data corruption, and elastic runs: a layout
that fits the processes that are left, and the end of restarts that make no progress.
"""

import json
import logging
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from megatfm.checkpoint import ShardedTensor
from megatfm.checkpoint.sharded_tensor import view_as_bytes
from megatfm.config import Config, ResilienceConfig
from megatfm.config.world_size import fit_layout
from megatfm.engines.interface import Arrays, Engine, LossFunction, LossTotals, RowSources, ScalesLoss
from megatfm.errors import MegatfmError, NoProgressError
from megatfm.object_collectives import gather_errors, run_on_rank_0_raising
from megatfm.terminal import join_first
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.decision_log import DecisionLog
from megatfm.train.process_state import load_rng_state_dict, rng_state_dict

log = logging.getLogger("megatfm")

MIN_RELATIVE_MAD = 1e-3
"""Lower bound of the median absolute deviation, relative to the median: without it, any change after a run of nearly
equal losses would be a spike."""
MAX_LISTED = 5
"""Number of names that an error lists; further ones are counted."""
ATTEMPTS = "attempts.json"
"""File in the run directory: restarts of torchrun's agent at its first start from the newest checkpoint."""

BlockKey = tuple[str, tuple[int, ...]]
"""Name of a tensor and offsets of a block in it. Blocks with equal name and offsets are replicas."""


@dataclass
class LossGuard:
    """Skips steps with a loss or gradient that is not finite, and detects loss spikes. Checkpoints store its state."""

    config: ResilienceConfig
    max_grad_norm: float
    decisions: DecisionLog
    losses: deque[float] = field(init=False)
    consecutive_skips: int = 0
    skipped: int = 0
    is_in_spike: bool = False

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.config.spike_window)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON: recent losses, steps skipped in a row and in total, whether the loss spikes."""
        return {
            "losses": list(self.losses),
            "in_a_row": self.consecutive_skips,
            "skipped": self.skipped,
            "leaping": self.is_in_spike,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; old checkpoints without one restore the initial state."""
        self.losses = deque(map(float, state.get("losses", ())), maxlen=self.config.spike_window)
        self.consecutive_skips, self.skipped = int(state.get("in_a_row", 0)), int(state.get("skipped", 0))
        self.is_in_spike = bool(state.get("leaping", False))

    def take_step(self, engine: Engine, step: int, totals: LossTotals, lr: float) -> tuple[float, str | None]:
        """Clip gradients and update, unless loss or gradient is not finite, or the decision log skips this step.

        Returns the gradient norm before clipping (NaN for a skipped step), and for a skipped step a detail for the log.
        Overflows of float16 are neither recorded nor counted while the loss scale can still be halved. Raises
        MegatfmError after more than `resilience.max_skipped` skipped steps in a row.
        """
        was_skipped = step in self.decisions.skips
        scale = engine.loss_scale if isinstance(engine, ScalesLoss) else None
        old_scale, could_fall = (scale.value, scale.can_fall) if scale else (1.0, False)
        norm = engine.step(lr, self.max_grad_norm, skip=was_skipped)
        if math.isfinite(norm):
            return norm, None
        loss = totals.loss
        if scale and could_fall and not was_skipped and math.isfinite(loss):
            return math.nan, (
                f"gradients overflow float16, so the loss scale falls from {old_scale:g} to {scale.value:g}: the "
                "weights stay unchanged"
            )
        self.consecutive_skips += 1
        self.skipped += 1
        if self.consecutive_skips > self.config.max_skipped:
            raise MegatfmError(
                f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}: not finite, {self.consecutive_skips} steps "
                "in a row, so the run ends (resilience.max_skipped). Resume with a lower optimizer.lr and "
                "resume.allow=optimizer, or with another train.precision"
            )
        self.decisions.skip(step)
        reason = "as before" if was_skipped else f"loss {loss:.4g}, gradient norm {norm:.4g}"
        detail = f"{reason}: not finite, so the weights stay unchanged ({self.consecutive_skips} in a row)"
        return math.nan, detail

    def record_rollback(self, spike: int, step: int, position: int) -> None:
        """Record a rollback. Raises MegatfmError after `resilience.max_rollbacks` to the same step."""
        if self.decisions.rollbacks.get(step, 0) >= self.config.max_rollbacks:
            raise MegatfmError(
                f"step {spike}: the loss spikes again after {self.config.max_rollbacks} rollbacks to step {step} "
                "(resilience.max_rollbacks). Resume with a lower optimizer.lr and resume.allow=optimizer"
            )
        self.decisions.record_rollback(spike, step, position)

    def observe(self, loss: float) -> float | None:
        """Add the loss of a step that was not skipped; return the spike's score if a spike begins with it."""
        self.consecutive_skips = 0
        score = self._score(loss)
        was_in_spike, self.is_in_spike = self.is_in_spike, score is not None
        self.losses.append(loss)
        return None if was_in_spike else score

    def _score(self, loss: float) -> float | None:
        if self.config.spike == "off" or len(self.losses) < self.config.spike_window // 4:
            return None
        median = statistics.median(self.losses)
        mad = 1.4826 * statistics.median(abs(past_loss - median) for past_loss in self.losses)
        score = (loss - median) / max(mad, MIN_RELATIVE_MAD * abs(median), 1e-12)
        return score if score > self.config.spike_score else None


def forward_backward_with_replay(
    engine: Engine,
    microbatches: Sequence[Arrays],
    objective: LossFunction,
    step: int,
    *,
    replay_every: int,
    collect_statistics: bool = False,
    sources: RowSources | None = None,
) -> LossTotals:
    """Run the engine's `forward_backward`; every `replay_every` steps (0: never) twice, and compare. A collective.

    Both passes agree if the kernels are deterministic: dropout is keyed by step and sample, and the global generators,
    from which plugins may draw, are reset between the passes. Raises MegatfmError on all ranks if a bit differs; it
    names ranks and parameters.
    """
    options: dict[str, Any] = {"record_activations": collect_statistics}
    if sources:  # engines without this feature don't accept the argument
        options["sources"] = sources
    if replay_every == 0 or step % replay_every:
        return engine.forward_backward(microbatches, objective, **options)
    rng_state = rng_state_dict(0, engine.device)
    first = engine.forward_backward(microbatches, objective, **options)
    first_gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    engine.zero_grad()
    load_rng_state_dict(rng_state, 0, engine.device)
    replayed = engine.forward_backward(microbatches, objective, **options)
    differing = [
        name for name, gradient in engine.gradients().items() if not _are_identical(first_gradients[name], gradient)
    ]
    if first.sums != replayed.sums and all(map(math.isfinite, first.sums.values())):
        differing.insert(0, "the loss")
    raise_differences(differing, f"step {step}, computed twice, differs")
    return replayed


def compare_replicas(engine: Engine, step: int, every: int) -> None:
    """Every `every` steps (0: never), compare hashes of weights and optimizer state between replicas. A collective.

    Raises MegatfmError on all ranks if replicas differ; it names the parameters, and the ranks in the minority.
    """
    replicated_axes = engine.replicated_axes
    if every == 0 or step % every or all(engine.mesh.size(axis) == 1 for axis in replicated_axes):
        return
    local_hashes = hash_blocks(engine.state_dict())
    all_hashes: list[dict[BlockKey, str]] = engine.mesh.gather_objects(local_hashes, replicated_axes)
    differing = []
    for (name, offsets), local_hash in local_hashes.items():
        # Only ranks that hold the block vote: some optimizer state exists on one rank only.
        votes = Counter(rank_hashes[name, offsets] for rank_hashes in all_hashes if (name, offsets) in rank_hashes)
        majority_hash, count = votes.most_common(1)[0]
        is_tie = list(votes.values()).count(count) > 1
        if len(votes) > 1 and (is_tie or local_hash != majority_hash):
            differing.append(name)
    raise_differences(differing, f"after step {step}, replicas of one parameter differ")


def hash_blocks(state: Mapping[str, ShardedTensor | Tensor]) -> dict[BlockKey, str]:
    """Return the BLAKE3 hash of each block of a state dict that this rank holds."""
    sharded_tensors = {name: ShardedTensor.from_tensor(value) for name, value in state.items()}
    return {
        (name, block.offsets): blake3(view_as_bytes(block.tensor.cpu().contiguous()).numpy().data).hexdigest()
        for name, sharded_tensor in sharded_tensors.items()
        for block in sharded_tensor.blocks
    }


def _are_identical(first: Tensor, second: Tensor) -> bool:
    """Return whether all bits are equal: NaN equals itself, −0 differs from 0."""
    return torch.equal(view_as_bytes(first.contiguous()), view_as_bytes(second.contiguous()))


def raise_differences(differing: list[str], subject: str) -> None:
    """Raise the same MegatfmError on all ranks if any rank has names in `differing`."""
    if names_by_rank := gather_errors(differing):
        ranks_text = "; ".join(f"{rank}: {join_first(names, MAX_LISTED)}" for rank, names in names_by_rank.items())
        raise MegatfmError(
            f"{subject}: {ranks_text}. A processor, its memory or a kernel is faulty. Nothing has been saved since: "
            "resume without that machine"
        )


def adapt_layout(config: Config, world_size: int) -> Config:
    """Return the config; with `resilience.elastic`, with a layout that fits the number of processes."""
    if not config.resilience.elastic:
        return config
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        log.warning(
            "torchrun's agents share one store, which rank 0's node serves: without it, the run can't go on. "
            "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
        )
    config, changes = fit_layout(config, world_size)
    if changes:
        log.warning("%d processes: %s", world_size, changes)
    return config


def check_progress(
    run: RunDirectory, step: int, max_failures: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Count the restarts of torchrun's elastic agent since the newest checkpoint, that of `step`. A collective.

    Raises NoProgressError on all ranks once there were `max_failures`. Does nothing without torchrun: the job script
    counts restarts under SLURM.
    """
    if environment.get("TORCHELASTIC_RUN_ID") is None:
        return
    run_id = environment["TORCHELASTIC_RUN_ID"]
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    failures = run_on_rank_0_raising(lambda: _count_restarts_since_checkpoint(run, run_id, restarts, step))
    if failures >= max_failures:
        raise NoProgressError(
            f"{run.folder}: {failures} restarts in a row saved no checkpoint after step {step} "
            "(resilience.max_failures): logs/ says why they ended"
        )


def _count_restarts_since_checkpoint(run: RunDirectory, run_id: str, restarts: int, step: int) -> int:
    """Return the number of restarts since the agent's first start from this checkpoint; write it to attempts.json."""
    path = run.folder / ATTEMPTS
    first = None
    try:
        previous = json.loads(path.read_bytes())
        if (previous["agent"], previous["step"]) == (run_id, step):
            first = int(previous["restarts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing, or not written by megatfm
        pass
    # A new agent counts from 0 again, and has the same id if the user gave one.
    if first is None or first > restarts:
        run.write(ATTEMPTS, json.dumps({"agent": run_id, "step": step, "restarts": restarts}) + "\n")
        return 0
    return restarts - first
