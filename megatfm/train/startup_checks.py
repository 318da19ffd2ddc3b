"""Checks before the first step: disk, memory and communication; whether the layout fits the number of processes; and
whether restarts make progress.

A fault ends the run with an error that names rank and host. A slow rank is named in the log.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megatfm.checkpoint import file_io
from megatfm.checkpoint.directory import list_checkpoints
from megatfm.checkpoint.local import KEEP, NodeTopology
from megatfm.config import Config
from megatfm.config.root import list_global_batches
from megatfm.config.section import list_divisors
from megatfm.engines.interface import MOMENTS, Engine
from megatfm.errors import MegatfmError, NoProgressError, UsageError
from megatfm.files import atomic_write
from megatfm.object_collectives import all_gather_object, gather_errors, run_on_rank_0_raising
from megatfm.parallel.mesh import AXES, Mesh, compute_axis_sizes
from megatfm.parallel.process_environment import count_local_ranks
from megatfm.tracking.run_directory import RunDirectory
from megatfm.tracking.utilization import time_matmul
from megatfm.train.resilience import join_first

log = logging.getLogger("megatfm")

SLOW_FACTOR = 3.0
"""A rank is slow if one of its checks takes more than this factor times the median over ranks, and also exceeds the
median by more than a margin, the jitter of a healthy machine."""
SLOW_MARGIN_SECONDS = {"writing and syncing a file": 0.5, "a matmul": 0.005}
"""Check → margin. Sums over axes have SUM_MARGIN_SECONDS."""
SUM_MARGIN_SECONDS = 0.2
PROBE_BYTES = 64 * 1024
PROBE_ELEMENTS = 2**16
"""Number of elements in the all-reduce that tests an axis."""
ATTEMPTS = "attempts.json"


def preflight(config: Config, run: RunDirectory, engine: Engine, nodes: NodeTopology | None = None) -> list[str]:
    """Check disks, memory and every axis of the mesh; return one line for each slow rank. A collective.

    Raises MegatfmError on all ranks; it names the ranks where a check failed.
    """
    try:
        return _run_preflight(config, run, engine, nodes)
    finally:
        with contextlib.suppress(OSError):
            (run.folder / f".probe-{run.rank}").unlink()


def _run_preflight(config: Config, run: RunDirectory, engine: Engine, nodes: NodeTopology | None) -> list[str]:
    problems: list[str] = []
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    try:
        probe_disk(run.folder, run.rank)
        seconds["writing and syncing a file"] = time.perf_counter() - start
        state_bytes = estimate_checkpoint_bytes(run, engine)
        if run.is_main:
            keep, advice = config.checkpoint.keep, "lower checkpoint.keep, or give another run_dir"
            check_space(run.folder, run.checkpoints, state_bytes, keep, advice)
        if nodes and nodes.is_node_leader:
            check_local_disk(nodes, state_bytes)
        check_memory(config, engine)
        seconds["a matmul"] = time_matmul(torch.float32, engine.device)
    except (MegatfmError, OSError) as error:
        problems.append(str(error))
    raise_together(problems)
    raise_together(_find_missing_probes(run))
    seconds |= time_axes(engine.mesh, engine.device)
    return find_slow(all_gather_object((socket.gethostname(), seconds)))


def estimate_checkpoint_bytes(run: RunDirectory, engine: Engine) -> int:
    """Return a checkpoint's size in bytes: that of the last one, else the size of the weights and two moments."""
    for path in reversed(list_checkpoints(run.checkpoints)):
        with contextlib.suppress(OSError):  # try an older checkpoint
            if size := sum(file.stat().st_size for file in path.iterdir()):
                return size
    elements = sum(torch.Size(p.shape).numel() for p in engine.layout.values())
    return elements * engine.precision.param_dtype.itemsize * (1 + MOMENTS)


def probe_disk(folder: Path, rank: int) -> None:
    """Write, sync and rename a file, as a save does. Raises MegatfmError if this fails."""
    probe = folder / f".probe-{rank}"
    try:
        atomic_write(probe, os.urandom(PROBE_BYTES))
        if probe.stat().st_size != PROBE_BYTES:
            raise MegatfmError(f"{probe} has {probe.stat().st_size} bytes instead of the {PROBE_BYTES} written")
    except OSError as error:
        raise MegatfmError(f"{folder}: can't write, sync and rename a file there: {error.strerror}") from error


def check_space(folder: Path, checkpoints: Path, state_bytes: int, keep: int, advice: str) -> None:
    """Raise MegatfmError if there is too little space for `keep` checkpoints and the one being written.

    checkpoints: folder whose existing checkpoints count. advice: end of the message, how to mend it.
    """
    n_to_write = max(1, keep + 1 - len(list_checkpoints(checkpoints)))
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < n_to_write * state_bytes:
        raise MegatfmError(
            f"{folder}: {_format_bytes(free_bytes)} are free, but {n_to_write} more checkpoint{'s' * (n_to_write > 1)} "
            f"of {_format_bytes(state_bytes)} will be written: make room, {advice}"
        )


def check_local_disk(nodes: NodeTopology, state_bytes: int) -> None:
    """Check a node's local disk, which holds the node's own shards of checkpoints and copies of another node's."""
    try:
        nodes.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegatfmError(f"{nodes.folder}: can't create it (checkpoint.local_dir): {error.strerror}") from error
    probe_disk(nodes.folder, nodes.rank)
    (nodes.folder / f".probe-{nodes.rank}").unlink()
    n_ranks = len(nodes.list_ranks_on(nodes.node_of_rank[nodes.rank]))
    if nodes.n_nodes > 1:
        n_ranks += len(nodes.list_ranks_on(nodes.replicated_node))
    node_bytes = state_bytes * n_ranks // len(nodes.node_of_rank)
    check_space(nodes.folder, nodes.folder, node_bytes, KEEP, "or give another checkpoint.local_dir")


def check_memory(config: Config, engine: Engine) -> None:
    """Raise MegatfmError if there is less free memory than a step needs at least. The weights are already loaded."""
    train = config.train
    microbatches = train.global_batch // (train.micro_batch * engine.mesh.data_ranks)
    needed = engine.estimate_memory(
        microbatches, compute_block_input_bytes(config, engine.precision.compute_dtype.itemsize)
    )
    free_bytes = get_free_memory(engine.device)
    if needed.total > free_bytes:
        raise MegatfmError(
            f"{_format_bytes(free_bytes)} of memory are free for this rank, but gradients and optimizer state need "
            f"{_format_bytes(needed.gradients + needed.optimizer_state)}, gathered weights "
            f"{_format_bytes(needed.gathered)} and the inputs of blocks {_format_bytes(needed.block_inputs)}: "
            "lower train.micro_batch, shard over more ranks (parallel.zero, parallel.dp_shard, parallel.tp, "
            "parallel.pp), or make the model smaller"
        )


def compute_block_input_bytes(config: Config, itemsize: int) -> int:
    """Return the bytes of a block's input: a micro-batch's residual stream on one rank."""
    data, parallel = config.data, config.parallel
    row_length = min(data.sequence_length, data.target_length or data.sequence_length)
    n_shards = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    tokens = config.train.micro_batch * row_length // n_shards
    return tokens * config.model.d_model * itemsize


def get_free_memory(device: torch.device) -> int:
    """Return the bytes that this rank may allocate: on its GPU, or its share of the machine's or container's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free_bytes = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or the other version of control groups
            free_bytes = min(free_bytes, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free_bytes // max(1, count_local_ranks(os.environ) or 1)


def time_axes(mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Check and time an all-reduce over each axis with several ranks, after a first one that opens the connections.

    Returns the name of the check → seconds. A collective. Raises MegatfmError for a wrong sum.
    """
    seconds = {}
    for axis in AXES:
        if mesh.size(axis) == 1:
            continue
        values = torch.full((PROBE_ELEMENTS,), 1.0 + mesh.rank(axis), device=device)
        dist.all_reduce(values, group=mesh.group(axis))
        expected = sum(range(1, mesh.size(axis) + 1))
        raise_together([] if bool((values == expected).all()) else [f"a sum over the axis {axis} is wrong"])
        dist.barrier(mesh.group(axis))
        start = time.perf_counter()
        dist.all_reduce(values, group=mesh.group(axis))
        values[0].item()  # waits for a GPU
        seconds[f"a sum over {axis}"] = time.perf_counter() - start
    return seconds


def find_slow(per_rank: Sequence[tuple[str, Mapping[str, float]]]) -> list[str]:
    """Return one line for each check that took far longer on a rank than the median. per_rank: (host, durations)."""
    lines = []
    for check in per_rank[0][1]:
        median = statistics.median_low(seconds[check] for _, seconds in per_rank)
        for rank, (host, seconds) in enumerate(per_rank):
            margin = SLOW_MARGIN_SECONDS.get(check, SUM_MARGIN_SECONDS)
            if seconds[check] > max(SLOW_FACTOR * median, median + margin):
                lines.append(
                    f"rank {rank} on {host} is slow: {check} took {seconds[check]:.3f} s, on most ranks {median:.3f} s"
                )
    return lines


def _find_missing_probes(run: RunDirectory) -> list[str]:
    """Return a problem, on rank 0, if it can't see every rank's probe file: then run_dir is not on a shared disk."""
    dist.barrier()
    problems = []
    if run.is_main:
        probes = {run.folder / f".probe-{rank}": rank for rank in range(dist.get_world_size())}
        deadline = time.monotonic() + file_io.NFS_VISIBILITY_SECONDS
        while True:
            missing = [rank for probe, rank in probes.items() if not probe.exists()]
            if not missing or time.monotonic() >= deadline:
                break
            os.listdir(run.folder)  # noqa: PTH208  makes an NFS client refresh its cache
            time.sleep(0.1)
        if missing:
            names = ", ".join(map(str, missing[:8]))
            problems = [
                f"rank 0 can't see the file that rank {names} wrote to {run.folder}: run_dir must be on a shared disk"
            ]
        for probe in probes:
            probe.unlink(missing_ok=True)
    return problems


def raise_together(problems: list[str]) -> None:
    """Raise the same MegatfmError on all ranks if any rank has a problem."""
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, texts in gather_errors(problems).items():
        for text in texts:
            ranks_by_problem.setdefault(text, []).append(rank)
    if ranks_by_problem:
        lines = [f"{join_first(names, 8)}: {text}" for text, names in ranks_by_problem.items()]
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise MegatfmError(f"the check before training failed: {'; '.join(lines[:3])}{more}")


def _format_bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


# ---------------------------------------------------------------------------- the layout fits the processes


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


# ----------------------------------------------------------------------------------- restarts gain something


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
