"""Checks before the first step: disk, memory and communication.

A fault ends the run with an error that names rank and host. A slow rank is named in the log.
"""

import contextlib
import logging
import math
import os
import shutil
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megatfm.checkpoint import file_io
from megatfm.checkpoint.directory import list_checkpoints, remove_leftovers
from megatfm.checkpoint.local import KEEP, NodeTopology
from megatfm.config import Config
from megatfm.engines.interface import MOMENTS, Engine
from megatfm.errors import MegatfmError
from megatfm.files import atomic_write
from megatfm.object_collectives import all_gather_object, gather_errors
from megatfm.parallel.mesh import AXES, Mesh
from megatfm.parallel.process_environment import count_local_ranks
from megatfm.terminal import format_file_size, join_first
from megatfm.tracking.run_directory import RunDirectory
from megatfm.tracking.utilization import time_matmul

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
CGROUP_VERSIONS = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Version 2 and 1 of control groups: controller, files with limit and usage, and prefix of keys in memory.stat."""


def preflight(
    config: Config, run: RunDirectory, engine: Engine, nodes: NodeTopology | None = None, resume_step: int | None = None
) -> list[str]:
    """Check disks, memory and every axis of the mesh; return one line for each slow rank. A collective.

    resume_step: step of the run's checkpoint that it resumes from; None if it starts. Raises MegatfmError on all ranks;
    it names the ranks where a check failed.
    """
    folder = run.checkpoints if run.checkpoints.is_symlink() else run.folder  # perhaps on another disk
    try:
        return _run_preflight(config, run, folder, engine, nodes, resume_step)
    finally:
        with contextlib.suppress(OSError):
            (folder / f".probe-{run.rank}").unlink()


def _run_preflight(
    config: Config,
    run: RunDirectory,
    folder: Path,
    engine: Engine,
    nodes: NodeTopology | None,
    resume_step: int | None,
) -> list[str]:
    problems: list[str] = []
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    try:
        probe_disk(folder, run.rank)
        seconds["writing and syncing a file"] = time.perf_counter() - start
        state_bytes = estimate_checkpoint_bytes(run, engine)
        if run.is_main:
            n_new = count_new_checkpoints(config, len(list_checkpoints(run.checkpoints)), resume_step)
            check_space(folder, state_bytes, n_new, "lower checkpoint.keep, or give another run_dir")
            warn_of_kept_checkpoints(config, folder, state_bytes, resume_step or 0)
        if nodes and nodes.is_node_leader:
            check_local_disk(nodes, state_bytes)
        check_memory(config, engine)
        seconds["a matmul"] = time_matmul(torch.float32, engine.device)
    except (MegatfmError, OSError) as error:
        problems.append(str(error))
    raise_together(problems)
    raise_together(_find_missing_probes(folder, run.is_main))
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


def count_new_checkpoints(config: Config, n_present: int, resume_step: int | None) -> int:
    """Return how many checkpoints a run writes before it removes as many: the space that it needs, in checkpoints.

    n_present: checkpoints that it has. resume_step: step of the one that it resumes from; None if it starts.
    `checkpoint.keep_every` isn't counted, see `warn_of_kept_checkpoints`.
    """
    steps, first_step = config.train.steps, resume_step or 0
    if first_step >= steps:
        return 0
    tracks_best = bool(config.task or config.train.patience)  # see BestCheckpoint
    periods = [config.checkpoint.every, config.evaluate.every if tracks_best else 0]
    saves_left = sum(math.ceil(steps / every) - first_step // every for every in periods if every)
    n_kept = config.checkpoint.keep + tracks_best
    if resume_step is not None and not config.checkpoint.verify_after_write and saves_left > config.checkpoint.keep:
        n_kept += 1  # the verified checkpoint that it resumes from
    return min(saves_left, max(1, n_kept + 1 - n_present))


def check_space(folder: Path, state_bytes: int, n_new: int, advice: str) -> None:
    """Raise MegatfmError if there is too little space for `n_new` more checkpoints.

    advice: end of the message, how to mend it.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < n_new * state_bytes:
        raise MegatfmError(
            f"{folder}: {format_file_size(free_bytes)} are free, but {n_new} more checkpoint{'s' * (n_new > 1)} of "
            f"{format_file_size(state_bytes)} must fit: make room, {advice}"
        )


def warn_of_kept_checkpoints(config: Config, folder: Path, state_bytes: int, first_step: int) -> None:
    """Log a warning if the checkpoints that `checkpoint.keep_every` keeps for ever fill the disk before the run ends.

    No error: the user may make room during training.
    """
    steps, every, keep_every = config.train.steps, config.checkpoint.every, config.checkpoint.keep_every
    period = math.lcm(every, keep_every)
    n_kept = steps // period - first_step // period if period else 0
    free_bytes = shutil.disk_usage(folder).free
    if n_kept * state_bytes > free_bytes:
        log.warning(
            "%s: %s are free, but checkpoint.keep_every = %d will keep %d checkpoints of %s until step %d: make room "
            "before step %d",
            folder, format_file_size(free_bytes), keep_every, n_kept, format_file_size(state_bytes), steps,
            (first_step // period + free_bytes // state_bytes + 1) * period,
        )  # fmt: skip


def check_local_disk(nodes: NodeTopology, state_bytes: int) -> None:
    """Check a node's local disk, which holds the node's own shards of checkpoints and copies of another node's.

    Removes leftovers of killed saves first.
    """
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
    remove_leftovers(nodes.folder)
    n_new = max(1, KEEP + 1 - len(list_checkpoints(nodes.folder)))
    check_space(nodes.folder, node_bytes, n_new, "or give another checkpoint.local_dir")


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
            f"{format_file_size(free_bytes)} of memory are free for this rank, but gradients and optimizer state need "
            f"{format_file_size(needed.gradients + needed.optimizer_state)}, gathered weights "
            f"{format_file_size(needed.gathered)} and the inputs of blocks {format_file_size(needed.block_inputs)}: "
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
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch's allocator
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    own_groups = ""
    with contextlib.suppress(OSError):  # not on Linux
        own_groups = Path("/proc/self/cgroup").read_text()
    limits = list_cgroup_free_bytes(Path("/sys/fs/cgroup"), own_groups)
    free_bytes = min([int(psutil.virtual_memory().available), *limits])
    return free_bytes // max(1, count_local_ranks(os.environ) or 1)


def list_cgroup_free_bytes(folder: Path, own_groups: str) -> list[int]:
    """Return the bytes that the control groups of this process, of a container or a job, may still allocate.

    Groups without a limit are left out. The page cache counts as free, since the kernel reclaims it: files that were
    read soon fill the limit with it. own_groups: content of /proc/self/cgroup, lines of number:controllers:path.
    """
    entries = [line.split(":", 2) for line in own_groups.splitlines() if line.count(":") >= 2]
    free_bytes = []
    for controller, limit_name, usage_name, prefix in CGROUP_VERSIONS:
        paths = (path for _, controllers, path in entries if controller in controllers.split(","))
        root = folder / controller
        group = root / next(paths, "").lstrip("/")
        for ancestor in (group, *group.parents):
            if not ancestor.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or another version of control groups
                limit, usage = (int((ancestor / name).read_text()) for name in (limit_name, usage_name))
                stat = dict(line.split() for line in (ancestor / "memory.stat").read_text().splitlines())
                page_cache = sum(int(stat.get(f"{prefix}{key}_file", 0)) for key in ("active", "inactive"))
                free_bytes.append(limit - usage + page_cache)
    return free_bytes


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


def _find_missing_probes(folder: Path, is_main: bool) -> list[str]:
    """Return a problem, on rank 0, if it can't see every rank's probe file: then run_dir is not on a shared disk."""
    dist.barrier()
    if not is_main:
        return []
    probes = {folder / f".probe-{rank}": rank for rank in range(dist.get_world_size())}
    deadline = time.monotonic() + file_io.NFS_VISIBILITY_SECONDS
    for probe in probes:
        file_io.wait_until_visible(probe, deadline)
    missing = [rank for probe, rank in probes.items() if not probe.exists()]
    for probe in probes:
        with contextlib.suppress(OSError):  # the other ranks wait for this one, which must not fail alone
            probe.unlink(missing_ok=True)
    if not missing:
        return []
    names = ", ".join(map(str, missing[:8]))
    return [f"rank 0 can't see the file that rank {names} wrote to {folder}: it must be on a shared disk"]


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
