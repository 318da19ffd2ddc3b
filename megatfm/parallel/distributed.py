"""The default process group, and how the ranks of a run meet in it under any launcher.

torchrun, srun, mpirun and a single process all end in the same process group, so that no other code asks.
"""

import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import raise_descriptor_limit
from megatfm.object_collectives import machine
from megatfm.parallel.process_environment import Launcher, ProcessEnvironment, read_process_environment
from megatfm.parallel.startup_watch import STOPPED_KEY, StartupWatch

log = logging.getLogger("megatfm")

Device = Literal["auto", "cpu", "cuda"]

RENDEZVOUS_SECONDS = 300.0
"""For ranks to meet: machines load the same libraries at very different speeds."""

TIMEOUTS = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
"""torch's own, of gloo and NCCL."""

POLL_INTERVAL = timedelta(seconds=1)
"""Between looks whether a rank that is missing was stopped."""
RESTART_POLL_SECONDS = 0.02
LOOK_TIMEOUT = timedelta(seconds=60)
"""For the rank that looks which ones are missing."""
LAZY_GLOO_RANKS = 64
"""From so many ranks on, gloo connects two ranks when they first talk, not all pairs of each group when it is made."""
DESCRIPTORS_PER_RANK = 4
"""Sockets that a process may need for each other rank: of groups that gloo connects, NCCL's, the store's."""


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
    """Set up the default process group and this process's device.

    `timeout` is in seconds, for meeting the others, and for every later collective if `collective_timeout` is not
    given. An existing group is used unchanged. Raises UsageError for an environment that contradicts
    itself, MegatfmError when the others can't be reached.
    """
    later = timedelta(seconds=collective_timeout or timeout)
    if dist.is_initialized():
        local_ranks = (torch.cuda.device_count() if device != "cpu" else 0) or dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % local_ranks))
        _timeout_of_later_groups(later, later)
        env = ProcessEnvironment("none", dist.get_rank(), dist.get_world_size(), local_rank)
        return ProcessInfo(env.rank, env.world_size, local_rank, env.launcher, _device(env, device))
    env = read_process_environment(os.environ)
    chosen = _device(env, device)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    options: dict[str, Any] = {"backend": backend, "timeout": later}
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        options["device_id"] = chosen
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
    start = time.monotonic()
    if env.address and env.launcher != "mpirun":
        check_resolves(env.address, env.rank)
    try:
        with StartupWatch(env):
            if env.launcher == "mpirun" and env.world_size > 1:
                env, store = _rendezvous_over_mpi(env, timedelta(seconds=timeout))
            else:
                store = _store(env, timedelta(seconds=timeout))
            if env.world_size > 1:
                # Rank 0's wait in torchrun's store counts towards the time that the others have.
                since = start if env.rank == 0 else time.monotonic()
                _wait_for_all_ranks(store, env, timedelta(seconds=timeout), since)
            dist.init_process_group(store=store, rank=env.rank, world_size=env.world_size, **options)
            _timeout_of_later_groups(later, later)
    except (dist.DistError, RuntimeError) as error:
        address = f" at {env.address}:{env.port}" if env.address else ""
        raise MegatfmError(
            f"rank {env.rank} of {env.world_size} could not meet the others{address} within {timeout:g} s: check "
            f"that all ranks run, that the host is reachable and the port free ({_first_line(error)})"
        ) from error
    return ProcessInfo(env.rank, env.world_size, env.local_rank, env.launcher, chosen, env.address)


def check_resolves(address: str, rank: int) -> None:
    """Raise MegatfmError where there is no host of this name, since no waiting mends that."""
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        if error.errno not in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return  # a name server that doesn't answer may yet
        raise MegatfmError(
            f"rank {rank} on {socket.gethostname()} knows no host {address!r} ({error.strerror}): set MASTER_ADDR to a "
            "name or number of rank 0's machine that all machines know"
        ) from None
    except UnicodeError:
        raise MegatfmError(
            f"MASTER_ADDR = {address!r:.80} is no host's name: set it to rank 0's machine"
        ) from None


def shutdown() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _timeout_of_later_groups(*TIMEOUTS)


@contextmanager
def distributed_session(
    timeout: float = 600.0, device: Device = "auto", collective_timeout: float | None = None
) -> Iterator[ProcessInfo]:
    """Call `init_distributed`, and at the end `shutdown`; a group that was there before stays.

    After an error on GPUs the group is left to the end of the process: to dismantle NCCL, the others must answer.
    """
    was_there = dist.is_initialized()
    original_timeouts = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    rank = None
    try:
        rank = init_distributed(timeout, device, collective_timeout)
        yield rank
    except BaseException:
        was_there = was_there or (rank is not None and rank.device.type == "cuda" and rank.world_size > 1)
        raise
    finally:
        if not was_there:
            shutdown()
        else:
            _timeout_of_later_groups(*original_timeouts)


def _timeout_of_later_groups(gloo: timedelta, nccl: timedelta | None) -> None:
    """Set torch's default timeouts: a mesh makes groups, or splits them from others, without a timeout of their own,
    and doesn't take that of the group of all ranks."""
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = gloo, nccl


def _device(env: ProcessEnvironment, requested: Device) -> torch.device:
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError("train.device = 'cuda': torch sees no GPU here; use train.device=cpu")
    if env.local_rank < count:
        return torch.device("cuda", env.local_rank)
    if env.launcher == "srun" and count == 1:  # --gpus-per-task: each task sees its own GPU as number 0
        return torch.device("cuda", 0)
    raise UsageError(
        f"local rank {env.local_rank} has no GPU: torch sees {count}; start at most {count} processes a node, "
        "or use train.device=cpu"
    )


def _store(env: ProcessEnvironment, timeout: timedelta) -> dist.Store:
    """Open the store in which the ranks meet. A single process needs no port."""
    if env.world_size == 1:
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent has opened it already
        store, _, _ = next(iter(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout)))
        return restart_store(store, env.rank, env.world_size, timeout)
    assert env.address is not None
    return dist.TCPStore(
        env.address, env.port, env.world_size, env.rank == 0, timeout, wait_for_workers=False
    )


def restart_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that no other start uses: torchrun's agents keep one over all restarts (torch 2.13).

    Entries of an earlier start (arrived ranks, their addresses) must not be mistaken for this one's. The
    restart count that torchrun gives doesn't tell starts apart: an agent that restarts because another one did so
    doesn't count it. So rank 0 makes up a name for the start, and the ranks learn it by names that they make up
    themselves. A collective of the ranks of a start. Raises MegatfmError where rank 0 doesn't come; that others don't
    come, `_wait_for_all_ranks` says.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"megatfm/hello/{rank}", name)
        try:
            store.wait([f"megatfm/welcome/{name}"], timeout)
        except dist.DistError as error:
            raise MegatfmError(
                f"rank 0 of {world_size} did not start within {timeout.total_seconds():g} s: check its log or its node"
            ) from error
        part = dist.PrefixStore(store.get(f"megatfm/welcome/{name}").decode(), store)
        part.set(f"megatfm/knows/{rank}", "1")
        return part
    part = dist.PrefixStore(name, store)
    missing, answered = set(range(1, world_size)), dict[int, bytes]()
    deadline = time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < deadline:
        for peer in sorted(missing):
            if part.check([f"megatfm/knows/{peer}"]):
                missing.remove(peer)
            elif store.check([f"megatfm/hello/{peer}"]):
                # It may be of an earlier start, for which no rank waits any more: then another one follows.
                hello = store.get(f"megatfm/hello/{peer}")
                if answered.get(peer) != hello:
                    store.set(f"megatfm/welcome/{hello.decode()}", name)
                    answered[peer] = hello
        time.sleep(RESTART_POLL_SECONDS)
    return part


def _wait_for_all_ranks(store: dist.Store, env: ProcessEnvironment, timeout: timedelta, since: float) -> None:
    """Wait until all ranks have arrived. Raises MegatfmError with the ranks that didn't arrive within `timeout` of
    `since`, a time of time.monotonic()."""
    store.set(f"megatfm/here/{env.rank}", socket.gethostname())
    if store.add("megatfm/arrived", 1) == env.world_size:
        store.set("megatfm/all", "1")
    deadline = since + timeout.total_seconds()
    while (error := _poll_store(store)) is not None:
        if store.check([STOPPED_KEY]):
            if env.rank == 0:
                time.sleep(
                    2 * POLL_INTERVAL.total_seconds()
                )  # the store goes with it, and the others want to read it, too
            raise MegatfmError(store.get(STOPPED_KEY).decode())
        if time.monotonic() < deadline:
            continue
        names = _name_missing_ranks(store, env.world_size)
        if not names:  # the last came, and has not said so yet
            raise error
        if env.rank == 0:
            time.sleep(2 * POLL_INTERVAL.total_seconds())  # as above
        raise MegatfmError(
            f"rank {names} of {env.world_size} did not start within {timeout.total_seconds():g} s: check its log "
            "or its node"
        ) from error


def _name_missing_ranks(store: dist.Store, world_size: int) -> str:
    """Return the numbers of ranks that have not come, "" if all have. The first that asks looks, and tells the others:
    of 10,000 ranks that each look for all, the store would be asked 10⁸ times."""
    if store.add("megatfm/looks", 1) > 1:
        store.wait(["megatfm/missing"], LOOK_TIMEOUT)
        return store.get("megatfm/missing").decode()
    missing = [n for n in range(world_size) if not store.check([f"megatfm/here/{n}"])]
    names = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
    store.set("megatfm/missing", names)
    return names


def _poll_store(store: dist.Store) -> dist.DistError | None:
    """Wait for a poll interval; returns the error if not all ranks have arrived."""
    try:
        store.wait(["megatfm/all"], POLL_INTERVAL)
    except dist.DistError as error:
        return error
    return None


def _rendezvous_over_mpi(
    env: ProcessEnvironment, timeout: timedelta
) -> tuple[ProcessEnvironment, dist.Store]:
    """Agree over MPI on a port that rank 0 has just opened, then leave MPI: torch talks for itself from here on."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"started by mpirun, but mpi4py can't be used ({_first_line(error)}): "
            "pip install 'megatfm[mpi]', with an MPI library on the system"
        ) from error
    is_started_here = not MPI.Is_initialized()
    if is_started_here:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # of another MPI's launcher: said better just below
            MPI.Init()
    world = MPI.COMM_WORLD
    if world.size != env.world_size:
        raise UsageError(
            f"mpirun started {env.world_size} processes, but mpi4py sees {world.size}: it loads another MPI library "
            f"({MPI.Get_library_version().split(',')[0].strip()}); point MPI4PY_LIBMPI at the one of this mpirun"
        )
    places = world.allgather((machine(), socket.gethostname()))
    store = None
    address, port, problem = "", 0, None
    if world.rank == 0:
        try:
            address = _own_address(places)
            store = dist.TCPStore(address, 0, world.size, True, timeout, wait_for_workers=False)
            port = store.port
        except (MegatfmError, RuntimeError) as error:
            problem = _first_line(error)
    address, port, problem = world.bcast((address, port, problem))
    if is_started_here:
        MPI.Finalize()
    if problem is not None:
        raise MegatfmError(f"rank 0 on {places[0][1]} can't wait for the others: {problem}")
    if store is None:
        store = dist.TCPStore(address, port, env.world_size, False, timeout)
    return replace(env, address=address, port=port), store


def _own_address(places: Sequence[tuple[str, str]]) -> str:
    """The address at which the others reach rank 0, this one. places: machine and host name of each rank.

    Return the address of this host as another host sees it; its own name may resolve to another address. Raises
    MegatfmError where it can't be found and MASTER_ADDR isn't set.
    """
    (own_machine, name), *_ = places
    other_hosts = {host for machine, host in places if machine != own_machine}
    if not other_hosts:
        return "127.0.0.1"
    reason = ""
    for other_host in sorted(other_hosts - {name}):
        try:
            for family, kind, _, _, socket_address in socket.getaddrinfo(
                other_host, 9, type=socket.SOCK_DGRAM
            ):
                with socket.socket(family, kind) as probe:
                    probe.connect(socket_address)  # UDP: picks the route, sends nothing
                    address = str(probe.getsockname()[0])
                if not address.startswith("fe80:"):  # which is of one cable, and needs an interface with it
                    return address
        except OSError as error:
            reason = reason or f"{other_host}: {error.strerror or error}"
    if master_address := os.environ.get("MASTER_ADDR"):
        return master_address
    raise MegatfmError(
        f"it can't find the others by name ({reason or f'all are called {name}'}): set MASTER_ADDR to the name or "
        "address under which they reach it, and have mpirun pass it on"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
