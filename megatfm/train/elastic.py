"""Elastic runs: a layout that fits the processes that are left, and the end of restarts that make no progress."""

import json
import logging
import os
from collections.abc import Mapping

from megatfm.config import Config
from megatfm.config.world_size import fit_layout
from megatfm.errors import NoProgressError
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.tracking.run_directory import RunDirectory

log = logging.getLogger("megatfm")

ATTEMPTS = "attempts.json"
"""File in the run directory: restarts of torchrun's agent at its first start from the newest checkpoint."""


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
