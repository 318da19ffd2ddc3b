"""Initialise the default process group under any launcher: torchrun, srun, mpirun or a single process.

The result is the same for all of them, so no other code depends on the launcher.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import raise_descriptor_limit
from megatfm.parallel.process_environment import Launcher, ProcessEnvironment, read_process_environment
from megatfm.parallel.rendezvous import open_store, take_first_line, wait_for_all_ranks
from megatfm.parallel.startup_watch import StartupWatch

log = logging.getLogger("megatfm")

Device = Literal["auto", "cpu", "cuda"]

RENDEZVOUS_SECONDS = 300.0
"""Default timeout of the rendezvous: machines load the same libraries at very different speeds."""

TIMEOUTS = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
"""torch's default timeouts of gloo and NCCL."""

LAZY_GLOO_RANKS = 64
"""From this number of ranks, gloo connects a pair at its first message instead of all pairs at group creation."""
DESCRIPTORS_PER_RANK = 4
"""Sockets that a process may need per other rank: for gloo's groups, NCCL and the store."""


@dataclass(frozen=True)
class ProcessInfo:
    """This process's rank in the run, and its device."""

    rank: int
    world_size: int
    local_rank: int
    launcher: Launcher
    device: torch.device
    address: str | None = None
    """Address of rank 0; None if the process group existed already."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files of the run (rank 0)."""
        return self.rank == 0


def init_distributed(
    timeout: float = 600.0, device: Device = "auto", collective_timeout: float | None = None
) -> ProcessInfo:
    """Initialise the default process group and this process's device.

    timeout: seconds for the rendezvous. collective_timeout: seconds for later collectives (default: `timeout`). An
    existing group is used unchanged, on the GPU that it is bound to. Raises UsageError for a contradictory environment,
    MegatfmError if other ranks can't be reached.
    """
    default_timeout = timedelta(seconds=collective_timeout or timeout)
    if dist.is_initialized():
        return _use_default_group(default_timeout, device)
    env = read_process_environment(os.environ)
    process_device = _choose_device(env, device)
    backend = "cpu:gloo,cuda:nccl" if process_device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"backend": backend, "timeout": default_timeout}
    if process_device.type == "cuda":
        torch.cuda.set_device(process_device)
        options["device_id"] = process_device
    if env.world_size >= LAZY_GLOO_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if missing := raise_descriptor_limit(DESCRIPTORS_PER_RANK * env.world_size):
        log.warning(
            "rank %d may open %d files and sockets too few for %d ranks: raise the hard limit (ulimit -Hn, or "
            "LimitNOFILE of slurmd)",
            env.rank,
            missing,
            env.world_size,
        )
    try:
        with StartupWatch(env):
            start = time.monotonic()
            env, store = open_store(env, timedelta(seconds=timeout))
            if env.world_size > 1:
                # Rank 0's wait in torchrun's store counts towards the time that the others have.
                since = start if env.rank == 0 else time.monotonic()
                wait_for_all_ranks(store, env, timedelta(seconds=timeout), since)
            dist.init_process_group(store=store, rank=env.rank, world_size=env.world_size, **options)
            _list_world_ranks()
            _set_default_timeouts(default_timeout, default_timeout)
    except (dist.DistError, RuntimeError) as error:
        address = f" at {env.address}:{env.port}" if env.address else ""
        raise MegatfmError(
            f"rank {env.rank} of {env.world_size} could not meet the others{address} within {timeout:g} s: check "
            f"that all ranks run, that the host is reachable and the port free ({take_first_line(error)})"
        ) from error
    return ProcessInfo(env.rank, env.world_size, env.local_rank, env.launcher, process_device, env.address)


def _use_default_group(timeout: timedelta, device: Device) -> ProcessInfo:
    """Use the existing default group. timeout: of the groups that are created later."""
    local_ranks = (torch.cuda.device_count() if device != "cpu" else 0) or dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % local_ranks))
    _set_default_timeouts(timeout, timeout)
    env = ProcessEnvironment("none", dist.get_rank(), dist.get_world_size(), local_rank)
    process_device = _choose_device(env, device)
    _list_world_ranks()
    if process_device.type == "cuda":
        process_device = c10d._get_default_group().bound_device_id or process_device
        torch.cuda.set_device(process_device)
    return ProcessInfo(env.rank, env.world_size, local_rank, env.launcher, process_device)


def _list_world_ranks() -> None:
    """Tell the default group's backends their ranks, as those of other groups know them.

    A DeviceMesh on GPUs splits the default group, and a backend that isn't the process's first of its kind would then
    read beyond an empty list: a second session of a process died of a segmentation fault (torch 2.13;
    pytorch/pytorch#192106).
    """
    group = c10d._get_default_group()
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # a backend without options, or of a torch without splits
            options: Any = group._get_backend(device).options
            if hasattr(options, "global_ranks_in_group"):
                options.global_ranks_in_group = list(range(group.size()))


def shutdown() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _set_default_timeouts(*TIMEOUTS)


@contextmanager
def distributed_session(
    timeout: float = 600.0, device: Device = "auto", collective_timeout: float | None = None
) -> Iterator[ProcessInfo]:
    """Call `init_distributed`, and `shutdown` at the end unless the group already existed.

    After an error on GPUs the group stays until the process ends: destroying NCCL needs answers from the other ranks.
    """
    keep_group = dist.is_initialized()
    original_timeouts = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    info = None
    try:
        info = init_distributed(timeout, device, collective_timeout)
        yield info
    except BaseException:
        keep_group = keep_group or (info is not None and info.device.type == "cuda" and info.world_size > 1)
        raise
    finally:
        if not keep_group:
            shutdown()
        else:
            _set_default_timeouts(*original_timeouts)


def _set_default_timeouts(gloo: timedelta, nccl: timedelta | None) -> None:
    """Set torch's default timeouts: a DeviceMesh creates its groups with these, not with that of the default group."""
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = gloo, nccl


def _choose_device(env: ProcessEnvironment, requested: Device) -> torch.device:
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("train.device = 'cuda': torch sees no GPU here; use train.device=cpu")
    if env.local_rank < count:
        return torch.device("cuda", env.local_rank)
    # Each process sees its own GPU as number 0: by srun's --gpus-per-task, or by a script that mpirun starts.
    sees_own_gpu = env.launcher == "srun" or (env.launcher == "mpirun" and "CUDA_VISIBLE_DEVICES" in os.environ)
    if count == 1 and sees_own_gpu:
        return torch.device("cuda", 0)
    raise UsageError(
        f"local rank {env.local_rank} has no GPU: torch sees {count}; start at most {count} processes a node, "
        "or use train.device=cpu"
    )
