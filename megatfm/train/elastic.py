"""Elastic runs: a layout that fits the processes that are left, and the end of restarts that make no progress."""

import json
import logging
import os
from collections.abc import Mapping
from math import gcd

from megatfm.config import Config
from megatfm.config.root import list_global_batches
from megatfm.config.section import list_divisors
from megatfm.errors import NoProgressError, UsageError
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.parallel.mesh import compute_axis_sizes
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


def fit_layout(config: Config, world_size: int) -> tuple[Config, str | None]:
    """Return the config if its layout fits the number of processes; else the nearest one that fits, and its changes.

    Global batches (also those of `data.rampup`) and the axes that split the model (tp, pp, cp) stay as they are. The
    data axes take the remaining ranks; micro-batch and `ep` shrink if needed. None of this changes the result. Raises
    UsageError if nothing fits; it names numbers of processes that would.
    """
    try:
        sizes = compute_axis_sizes(config.parallel, world_size)
    except UsageError:
        sizes = None
    data_ranks, batches = world_size // count_ranks_per_model(config), list_global_batches(config)
    common = gcd(*batches)
    if sizes is not None and common % (config.train.micro_batch * data_ranks) == 0:
        return config, None
    if world_size % count_ranks_per_model(config) or common % data_ranks:
        batch_settings = ", ".join(f"{key} = {batch}" for batch, key in batches.items())
        raise UsageError(
            f"no layout fits {world_size} process{'es' * (world_size > 1)}: {batch_settings} and "
            f"{count_ranks_per_model(config)} ranks per model allow {_list_valid_world_sizes(config, common)} processes"
        )
    rows_per_rank = common // data_ranks
    micro_batch = max(m for m in list_divisors(rows_per_rank) if m <= config.train.micro_batch)
    replicas = max(
        r for r in range(1, config.parallel.dp_replicate + 1) if data_ranks % r == config.parallel.dp_replicate % r == 0
    )
    changes = {
        "dp_replicate": replicas,
        "dp_shard": config.parallel.dp_shard if sizes is not None else -1,
        "ep": gcd(config.parallel.ep, data_ranks // replicas * count_expert_ranks(config)),
    }
    parallel = config.parallel.model_copy(update=changes)
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    fitted = config.model_copy(update={"parallel": parallel, "train": train})
    return fitted, ", ".join(list_layout_changes(config, fitted))


def list_layout_changes(requested: Config, fitted: Config) -> list[str]:
    """Return the differences between the requested and the fitted layout, as `parallel.ep 4 → 2`."""
    values = [
        (f"{section}.{key}", value, getattr(getattr(fitted, section), key))
        for section in ("parallel", "train")
        for key, value in getattr(requested, section)
    ]
    return [f"{key} {old} → {new}" for key, old, new in values if old != new]


def count_ranks_per_model(config: Config) -> int:
    """Return the number of ranks that share one replica of the model."""
    return config.parallel.tp * config.parallel.pp * config.parallel.cp


def count_expert_ranks(config: Config) -> int:
    """Return the number of ranks, besides dp_shard, over which `ep` may extend."""
    return abs(config.parallel.expert_mesh_size // config.parallel.dp_shard)


def _list_valid_world_sizes(config: Config, batch: int) -> str:
    ranks = count_ranks_per_model(config)
    fitting = [str(ranks * n) for n in list_divisors(batch)]
    return ", ".join(fitting[-8:]) if len(fitting) <= 8 else f"{', '.join(fitting[:4])}, … {fitting[-1]}"


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
