"""Checks before the first step: can this run write, save, hold its state, and talk on every axis; does its layout fit
the processes that there are; and do restarts gain anything?

A fault ends the run, with its rank and host; a slow rank is named in the log.
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
from megatfm.config.root import global_batches
from megatfm.config.section import divisors
from megatfm.engines.interface import MOMENTS, Engine
from megatfm.errors import MegatfmError, NoProgressError, UsageError
from megatfm.files import atomic_write
from megatfm.object_collectives import all_gather, gather_errors, run_on_rank_0_raising
from megatfm.parallel.mesh import AXES, Mesh, axis_sizes
from megatfm.parallel.process_environment import ranks_here
from megatfm.tracking.hardware import time_matmul
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.resilience import join_first

log = logging.getLogger("megatfm")

SLOW_FACTOR = 3.0
"""A rank is slow if a check takes so many times the median over ranks, and exceeds it by the jitter of a sound
machine:"""
SLOW_MARGIN_SECONDS = {"writing and syncing a file": 0.5, "a matrix product": 0.005}
SUM_MARGIN_SECONDS = 0.2
"""Jitter of a sum over an axis."""
PROBE_BYTES = 64 * 1024
PROBE_ELEMENTS = 2**16
"""Elements of the collective on each axis."""
ATTEMPTS = "attempts.json"


def preflight(
    config: Config, run: RunDirectory, engine: Engine, nodes: NodeTopology | None = None
) -> list[str]:
    """Check disks, memory and every axis of the mesh; returns a line for each rank that is slow. A collective.

    Raises MegatfmError on all ranks, naming those where something is broken.
    """
    try:
        return _preflight(config, run, engine, nodes)
    finally:
        with contextlib.suppress(OSError):
            (run.folder / f".probe-{run.rank}").unlink()


def _preflight(config: Config, run: RunDirectory, engine: Engine, nodes: NodeTopology | None) -> list[str]:
    problems: list[str] = []
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    try:
        probe_disk(run.folder, run.rank)
        seconds["writing and syncing a file"] = time.perf_counter() - start
        state_bytes = checkpoint_bytes(run, engine)
        if run.is_main:
            keep, advice = config.checkpoint.keep, "lower checkpoint.keep, or give another run_dir"
            check_space(run.folder, run.checkpoints, state_bytes, keep, advice)
        if nodes and nodes.is_node_leader:
            check_local_disk(nodes, state_bytes)
        check_memory(config, engine)
        seconds["a matrix product"] = time_matmul(torch.float32, engine.device)
    except (MegatfmError, OSError) as error:
        problems.append(str(error))
    raise_together(problems)
    raise_together(_unseen_probes(run))
    seconds |= time_axes(engine.mesh, engine.device)
    return slow_ranks(seconds)


def checkpoint_bytes(run: RunDirectory, engine: Engine) -> int:
    """Return the bytes of a checkpoint: as much as the last one, or weights and two moments in their precision."""
    for path in reversed(list_checkpoints(run.checkpoints)):
        with contextlib.suppress(OSError):  # an unreadable file gives no information
            if size := sum(file.stat().st_size for file in path.iterdir()):
                return size
    elements = sum(torch.Size(p.shape).numel() for p in engine.layout.values())
    return elements * engine.precision.param_dtype.itemsize * (1 + MOMENTS)


def probe_disk(folder: Path, rank: int) -> None:
    """Write, sync and rename a file, as a save does. Raises MegatfmError that names what could not be done."""
    probe = folder / f".probe-{rank}"
    try:
        atomic_write(probe, os.urandom(PROBE_BYTES))
        if probe.stat().st_size != PROBE_BYTES:
            raise MegatfmError(f"{probe} came out with {probe.stat().st_size} bytes instead of {PROBE_BYTES}")
    except OSError as error:
        raise MegatfmError(
            f"{folder}: can't write, sync and rename a file there: {error.strerror}"
        ) from error


def check_space(folder: Path, checkpoints: Path, state_bytes: int, keep: int, advice: str) -> None:
    """Raise MegatfmError unless there is room for the checkpoints that are kept and the one being written, less those
    that are there."""
    n_to_write = max(1, keep + 1 - len(list_checkpoints(checkpoints)))
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < n_to_write * state_bytes:
        raise MegatfmError(
            f"{folder}: {_size(free_bytes)} are free, but {n_to_write} more checkpoint{'s' * (n_to_write > 1)} of "
            f"{_size(state_bytes)} will be "
            f"written: make room, {advice}"
        )


def check_local_disk(nodes: NodeTopology, state_bytes: int) -> None:
    """Check the same for a node's own disk, which holds its share of each checkpoint and that of the node before."""
    try:
        nodes.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegatfmError(
            f"{nodes.folder}: can't make it (checkpoint.local_dir): {error.strerror}"
        ) from error
    probe_disk(nodes.folder, nodes.rank)
    (nodes.folder / f".probe-{nodes.rank}").unlink()
    n_own = len(nodes.ranks_on(nodes.node_of_rank[nodes.rank])) + (nodes.n_nodes > 1) * len(
        nodes.ranks_on(nodes.replicated_node)
    )
    share, advice = state_bytes * n_own // len(nodes.node_of_rank), "or give another checkpoint.local_dir"
    check_space(nodes.folder, nodes.folder, share, KEEP, advice)


def check_memory(config: Config, engine: Engine) -> None:
    """Raise MegatfmError unless there is memory for what a step takes at least, on top of the weights, which are in
    memory already."""
    train = config.train
    microbatches = train.global_batch // (train.micro_batch * engine.mesh.data_ranks)
    needed = engine.memory_needed(
        microbatches, block_input_bytes(config, engine.precision.compute_dtype.itemsize)
    )
    free_bytes = free_memory(engine.device)
    if needed.total > free_bytes:
        raise MegatfmError(
            f"{_size(free_bytes)} of memory are free for this rank, but gradients and optimizer state need "
            f"{_size(needed.gradients + needed.optimizer_state)}, gathered weights {_size(needed.gathered)} "
            "and the inputs of "
            f"blocks {_size(needed.block_inputs)} besides the weights: lower train.micro_batch, or shard over "
            "more ranks "
            "(parallel.zero, parallel.dp_shard, parallel.tp, parallel.pp), or make the model smaller"
        )


def block_input_bytes(config: Config, itemsize: int) -> int:
    """Bytes of a micro-batch in the residual stream of one rank."""
    data, parallel = config.data, config.parallel
    tokens = min(data.sequence_length, data.target_length or data.sequence_length)
    parts = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    rows = config.train.micro_batch * tokens // parts
    return rows * config.model.d_model * itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that this rank may still take: of its GPU, or its share of this machine's (or this container's) memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free_bytes = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max", or not this version of control groups
            free_bytes = min(free_bytes, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free_bytes // max(1, ranks_here(os.environ) or 1)


def time_axes(mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Time a sum over each axis of several ranks, after one that opens its connections. A collective."""
    seconds = {}
    for axis in AXES:
        if mesh.size(axis) == 1:
            continue
        values = torch.full((PROBE_ELEMENTS,), 1.0 + mesh.rank(axis), device=device)
        dist.all_reduce(values, group=mesh.group(axis))
        expected = sum(range(1, mesh.size(axis) + 1))
        raise_together(
            [] if bool((values == expected).all()) else [f"a sum over the axis {axis} came out wrong"]
        )
        dist.barrier(mesh.group(axis))
        start = time.perf_counter()
        dist.all_reduce(values, group=mesh.group(axis))
        values[0].item()  # waits for a GPU
        seconds[f"a sum over {axis}"] = time.perf_counter() - start
    return seconds


def slow_ranks(seconds: Mapping[str, float]) -> list[str]:
    """Return a line for each rank whose check took far longer than the median over ranks. A collective."""
    return find_slow(all_gather((socket.gethostname(), dict(seconds))))


def find_slow(per_rank: Sequence[tuple[str, Mapping[str, float]]]) -> list[str]:
    """Return these lines from (host, check → seconds) of every rank."""
    lines = []
    for check in per_rank[0][1]:
        median = statistics.median_low(seconds[check] for _, seconds in per_rank)
        for rank, (host, seconds) in enumerate(per_rank):
            if seconds[check] > max(
                SLOW_FACTOR * median, median + SLOW_MARGIN_SECONDS.get(check, SUM_MARGIN_SECONDS)
            ):
                lines.append(
                    f"rank {rank} on {host} is slow: {check} took {seconds[check]:.3f} s, on most ranks {median:.3f} s"
                )
    return lines


def _unseen_probes(run: RunDirectory) -> list[str]:
    """Rank 0 must see every rank's probe: the run directory has to be one and the same on all machines."""
    dist.barrier()
    problems = []
    if run.is_main:
        probes = {run.folder / f".probe-{rank}": rank for rank in range(dist.get_world_size())}
        deadline = time.monotonic() + file_io.NFS_VISIBILITY_SECONDS
        while (absent := [n for p, n in probes.items() if not p.exists()]) and time.monotonic() < deadline:
            os.listdir(run.folder)  # noqa: PTH208  asks an NFS client to look again
            time.sleep(0.1)
        if absent:
            names = ", ".join(map(str, absent[:8]))
            problems = [
                f"what rank {names} wrote to {run.folder} can't be seen: run_dir must be on a shared disk"
            ]
        for probe in probes:
            probe.unlink(missing_ok=True)
    return problems


def raise_together(problems: list[str]) -> None:
    """Raise the same error on all ranks if any has a problem."""
    ranks: dict[str, list[str]] = {}  # problem → ranks that have it
    for rank, texts in gather_errors(problems).items():
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    if ranks:
        lines = [f"{join_first(names, 8)}: {text}" for text, names in ranks.items()]
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise MegatfmError(f"the check before training failed: {'; '.join(lines[:3])}{more}")


def _size(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


# ---------------------------------------------------------------------------- the layout fits the processes


def elastic_config(config: Config, world_size: int) -> Config:
    """Return the config, with another layout where `resilience.elastic` allows it and this many processes need it."""
    if not config.resilience.elastic:
        return config
    config, changes = fit_layout(config, world_size)
    if changes:
        log.warning("%d processes: %s", world_size, changes)
    return config


def fit_layout(config: Config, world_size: int) -> tuple[Config, str | None]:
    """Return the config itself if it fits, else the nearest fitting one, and the changes.

    Kept: the global batches, those of the warm-up too, and the axes that cut the model (tp, pp, cp). The data axes take
    the remaining ranks, and micro-batch and `ep` shrink if needed: none of these changes the result. Raises UsageError
    where nothing fits, naming numbers of processes that would.
    """
    try:
        sizes = axis_sizes(config.parallel, world_size)
    except UsageError:
        sizes = None
    data_ranks, batches = world_size // model_parallel_size(config), global_batches(config)
    common = gcd(*batches)
    if sizes is not None and common % (config.train.micro_batch * data_ranks) == 0:
        return config, None
    if world_size % model_parallel_size(config) or common % data_ranks:
        batch_settings = ", ".join(f"{key} = {batch}" for batch, key in batches.items())
        raise UsageError(
            f"no layout fits {world_size} process{'es' * (world_size > 1)}: {batch_settings} and "
            f"{model_parallel_size(config)} ranks a "
            f"model go with {_valid_world_sizes(config, common)} processes"
        )
    share = common // data_ranks
    micro_batch = max(m for m in divisors(share) if m <= config.train.micro_batch)
    replicas = max(
        r
        for r in range(1, config.parallel.dp_replicate + 1)
        if data_ranks % r == config.parallel.dp_replicate % r == 0
    )
    changes = {
        "dp_replicate": replicas,
        "dp_shard": config.parallel.dp_shard if sizes is not None else -1,
        "ep": gcd(config.parallel.ep, data_ranks // replicas * expert_fold_size(config)),
    }
    parallel = config.parallel.model_copy(update=changes)
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    fitted = config.model_copy(update={"parallel": parallel, "train": train})
    return fitted, ", ".join(layout_changes(config, fitted))


def layout_changes(requested: Config, fitted: Config) -> list[str]:
    """List the changes of a layout to fit the number of processes."""
    pairs = [
        (f"{section}.{key}", was, getattr(getattr(fitted, section), key))
        for section in ("parallel", "train")
        for key, was in getattr(requested, section)
    ]
    return [f"{key} {was} → {now}" for key, was, now in pairs if was != now]


def model_parallel_size(config: Config) -> int:
    """Ranks over which one copy of the model's work is cut."""
    return config.parallel.tp * config.parallel.pp * config.parallel.cp


def expert_fold_size(config: Config) -> int:
    """Ranks besides dp_shard's that `ep` divides."""
    return abs(config.parallel.expert_mesh_size // config.parallel.dp_shard)


def _valid_world_sizes(config: Config, batch: int) -> str:
    ranks = model_parallel_size(config)
    fitting = [str(ranks * n) for n in divisors(batch)]
    return ", ".join(fitting[-8:]) if len(fitting) <= 8 else f"{', '.join(fitting[:4])}, … {fitting[-1]}"


# ----------------------------------------------------------------------------------- restarts gain something


def check_progress(
    run: RunDirectory, step: int, max_failures: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Under torchrun's elastic agent, count the restarts since the newest checkpoint (of `step`). A collective.

    Raises NoProgressError on all ranks after `max_failures` of them. SLURM's jobs are counted by their script, and a
    person who starts a run again is not counted at all.
    """
    if environment.get("TORCHELASTIC_RUN_ID") is None:
        return
    run_id = environment["TORCHELASTIC_RUN_ID"]
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    failures = run_on_rank_0_raising(lambda: _count(run, run_id, restarts, step))
    if failures >= max_failures:
        raise NoProgressError(
            f"{run.folder}: {failures} restarts in a row gained no checkpoint beyond step {step} "
            "(resilience.max_failures): see logs/ for what ended them"
        )


def _count(run: RunDirectory, run_id: str, restarts: int, step: int) -> int:
    """Restarts of this agent since the first start that found this checkpoint."""
    path = run.folder / ATTEMPTS
    first = None
    try:
        previous = json.loads(path.read_bytes())
        if (previous["agent"], previous["step"]) == (run_id, step):
            first = int(previous["restarts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing, or not written by megatfm
        pass
    # An agent that was started anew counts from 0 again, under the same name if the user gave one.
    if first is None or first > restarts:
        run.write(ATTEMPTS, json.dumps({"agent": run_id, "step": step, "restarts": restarts}) + "\n")
        return 0
    return restarts - first
