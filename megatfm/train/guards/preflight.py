"""Before the first step: can this run write, save, hold its state, and talk on every axis? In well under a second.

What is broken ends the run, with the rank and host that it is broken on; what is merely slow is named in the log.
"""

import contextlib
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

from megatfm.atomic import atomic_write
from megatfm.checkpoint.folder import list_checkpoints
from megatfm.checkpoint.nodes import KEEP, NodeTopology
from megatfm.config import Config
from megatfm.engines.interface import MOMENTS, Engine
from megatfm.errors import MegatfmError
from megatfm.parallel.mesh import AXES, Mesh
from megatfm.parallel.process_environment import ranks_here
from megatfm.ranks import all_gather, gather_errors
from megatfm.train.record.run_directory import RunDirectory

SLOW_FACTOR = 3.0
"""Times the median of all ranks …"""
SLOW_MARGIN_SECONDS = {"writing and syncing a file": 0.5, "a matrix product": 0.005}
"""… and so much above it, what each takes now and then on a sound machine; a sum over an axis:"""
SUM_SLACK_SECONDS = 0.2
PROBE_BYTES = 64 * 1024
PROBE_ELEMENTS = 2**16
"""Elements of the collective on each axis."""
NFS_VISIBILITY_SECONDS = 10.0
"""How long a shared filesystem may take to show one machine the files of another."""


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
        seconds["a matrix product"] = time_matmul(engine.device)
    except (MegatfmError, OSError) as error:
        problems.append(str(error))
    raise_together(problems)
    raise_together(_unseen_probes(run))
    seconds |= time_axes(engine.mesh, engine.device)
    return slow_ranks(seconds)


def checkpoint_bytes(run: RunDirectory, engine: Engine) -> int:
    """What a checkpoint takes: as much as the last one, or weights and two moments in their precision."""
    for path in reversed(list_checkpoints(run.checkpoints)):
        with contextlib.suppress(OSError):  # one that can't be read tells nothing
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
    """There must be room for the checkpoints that are kept and the one being written, less those that are there."""
    n_to_write = max(1, keep + 1 - len(list_checkpoints(checkpoints)))
    free = shutil.disk_usage(folder).free
    if free < n_to_write * state_bytes:
        raise MegatfmError(
            f"{folder}: {_size(free)} are free, but {n_to_write} more checkpoint{'s' * (n_to_write > 1)} of "
            f"{_size(state_bytes)} will be "
            f"written: make room, {advice}"
        )


def check_local_disk(nodes: NodeTopology, state_bytes: int) -> None:
    """The same for a node's own disk, which holds its share of each checkpoint and that of the node before."""
    try:
        nodes.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegatfmError(
            f"{nodes.folder}: can't make it (checkpoint.local_dir): {error.strerror}"
        ) from error
    probe_disk(nodes.folder, nodes.rank)
    (nodes.folder / f".probe-{nodes.rank}").unlink()
    mine = len(nodes.ranks_on(nodes.node_of_rank[nodes.rank])) + (nodes.n_nodes > 1) * len(
        nodes.ranks_on(nodes.replicated_node)
    )
    share, advice = state_bytes * mine // len(nodes.node_of_rank), "or give another checkpoint.local_dir"
    check_space(nodes.folder, nodes.folder, share, KEEP, advice)


def check_memory(config: Config, engine: Engine) -> None:
    """What a step takes at least must be there, on top of the weights, which are in memory already."""
    train = config.train
    microbatches = train.global_batch // (train.micro_batch * engine.mesh.data_ranks)
    needed = engine.memory_needed(
        microbatches, block_input_bytes(config, engine.precision.compute_dtype.itemsize)
    )
    free = free_memory(engine.device)
    if needed.total > free:
        raise MegatfmError(
            f"{_size(free)} of memory are free for this rank, but gradients and optimizer state need "
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
    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max", or not this version of control groups
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free // max(1, ranks_here(os.environ) or 1)


def time_matmul(device: torch.device) -> float:
    """The best of several timings of a small matrix product: what the processor can do when it is let."""
    values, best = torch.ones(512, 512, device=device), float("inf")
    for _ in range(6):
        start = time.perf_counter()
        (values @ values)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return best


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
    """Compare what each check took on every rank; a line for each rank far above the median. A collective."""
    return find_slow(all_gather((socket.gethostname(), dict(seconds))))


def find_slow(per_rank: Sequence[tuple[str, Mapping[str, float]]]) -> list[str]:
    """The same, from (host, check → seconds) of every rank."""
    lines = []
    for check in per_rank[0][1]:
        middle = statistics.median_low(seconds[check] for _, seconds in per_rank)
        for rank, (host, seconds) in enumerate(per_rank):
            if seconds[check] > max(
                SLOW_FACTOR * middle, middle + SLOW_MARGIN_SECONDS.get(check, SUM_SLACK_SECONDS)
            ):
                lines.append(
                    f"rank {rank} on {host} is slow: {check} took {seconds[check]:.3f} s, on most ranks {middle:.3f} s"
                )
    return lines


def _unseen_probes(run: RunDirectory) -> list[str]:
    """Rank 0 must see every rank's probe: the run directory has to be one and the same on all machines."""
    dist.barrier()
    problems = []
    if run.is_main:
        probes = {run.folder / f".probe-{rank}": rank for rank in range(dist.get_world_size())}
        deadline = time.monotonic() + NFS_VISIBILITY_SECONDS
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
    ranks: dict[str, list[str]] = {}  # problem → those who have it
    for rank, texts in gather_errors(problems).items():
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    if ranks:
        said = [f"{join_first(names)}: {text}" for text, names in ranks.items()]
        more = f" (and {len(said) - 3} more)" if len(said) > 3 else ""
        raise MegatfmError(f"the check before training failed: {'; '.join(said[:3])}{more}")


def join_first(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _size(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
