"""Rendezvous: the ranks of a run find one another through a store on rank 0, over torchrun, srun or mpirun."""

import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import get_machine_name
from megatfm.parallel.process_environment import ProcessEnvironment
from megatfm.parallel.startup_watch import STOPPED_KEY

log = logging.getLogger("megatfm")

FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 1.0
"""First and longest pause of a rank that waits for the others, between two looks into the store."""
RESTART_POLL_SECONDS = 0.02
NOTICE_SECONDS = 15.0
"""Time after which rank 0 says for whom it waits."""
MISSING_RANKS_TIMEOUT = timedelta(seconds=60)
"""Timeout of waiting for the rank that lists the missing ones."""


def open_store(env: ProcessEnvironment, timeout: timedelta) -> tuple[ProcessEnvironment, dist.Store]:
    """Open the store of a run's ranks; return the environment with rank 0's address, and the store. A collective.

    A single process needs no port. Raises MegatfmError if rank 0 can't be reached, UsageError for an unusable MPI.
    """
    if env.world_size == 1:
        return env, dist.HashStore()
    if env.launcher == "mpirun":
        return _open_store_over_mpi(env, timeout)
    assert env.address is not None
    check_resolves(env.address, env.rank)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent has opened it already
        store, _, _ = next(iter(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout)))
        return env, restart_store(store, env.rank, env.world_size, timeout)
    store = dist.TCPStore(env.address, env.port, env.world_size, env.rank == 0, timeout, wait_for_workers=False)
    return env, store


def check_resolves(address: str, rank: int) -> None:
    """Raise MegatfmError if the host name doesn't exist, as waiting would not help."""
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
            f"MASTER_ADDR = {address!r:.80} is not a valid host name: set it to that of rank 0's machine"
        ) from None


def restart_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Prefix a store with a name unique to this (re)start: torchrun's agents keep one store over restarts (torch 2.13).

    Entries of an earlier start (arrived ranks, their addresses) must not be mistaken for this one's. torchrun's restart
    count is no help: an agent that restarts because another one did doesn't increment it. So rank 0 draws a unique
    name. Every other rank posts a unique hello, and rank 0 answers each hello with the name. A collective of the ranks
    of a start. Raises MegatfmError if rank 0 is missing; `wait_for_all_ranks` reports other missing ranks.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"megatfm/hello/{rank}", name)
        try:
            store.wait([f"megatfm/welcome/{name}"], timeout)
        except dist.DistError as error:
            raise MegatfmError(
                f"rank 0 of {world_size} did not start within {timeout.total_seconds():g} s: check its log or its "
                "node. If it waits, too, torchrun's agents have two stores, as a node joined late or the first one was "
                "lost (torch 2.13): start all agents again, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
            ) from error
        prefixed = dist.PrefixStore(store.get(f"megatfm/welcome/{name}").decode(), store)
        prefixed.set(f"megatfm/knows/{rank}", "1")
        return prefixed
    prefixed = dist.PrefixStore(name, store)
    missing, answered = set(range(1, world_size)), dict[int, bytes]()
    deadline, notice = time.monotonic() + timeout.total_seconds(), time.monotonic() + NOTICE_SECONDS
    while missing and time.monotonic() < deadline:
        for peer in sorted(missing):
            if prefixed.check([f"megatfm/knows/{peer}"]):
                missing.remove(peer)
            elif store.check([f"megatfm/hello/{peer}"]):
                # A hello from an earlier start is answered too; the rank's new hello then follows.
                hello = store.get(f"megatfm/hello/{peer}")
                if answered.get(peer) != hello:
                    store.set(f"megatfm/welcome/{hello.decode()}", name)
                    answered[peer] = hello
        if missing and notice <= time.monotonic():
            _warn_of_missing_ranks(_format_ranks(sorted(missing)), world_size, timeout)
            notice = deadline
        time.sleep(RESTART_POLL_SECONDS)
    return prefixed


def wait_for_all_ranks(store: dist.Store, env: ProcessEnvironment, timeout: timedelta, since: float) -> None:
    """Wait until all ranks have arrived. After a few seconds, rank 0 logs which ones are missing.

    Raises MegatfmError that names the ranks missing `timeout` after `since` (a time of time.monotonic()).
    """
    store.set(f"megatfm/here/{env.rank}", socket.gethostname())
    if store.add("megatfm/arrived", 1) == env.world_size:
        store.set("megatfm/all", "1")
    deadline, notice = since + timeout.total_seconds(), time.monotonic() + NOTICE_SECONDS
    pause = FIRST_POLL_SECONDS
    # `check` and not `wait`, which prints two warnings for each time that it times out (torch 2.13).
    while not store.check(["megatfm/all"]):
        if store.check([STOPPED_KEY]):
            if env.rank == 0:
                time.sleep(2 * MAX_POLL_SECONDS)  # so that the others can still read its store
            raise MegatfmError(store.get(STOPPED_KEY).decode())
        if time.monotonic() < deadline:
            if env.rank == 0 and notice <= time.monotonic() and (names := _list_missing_ranks(store, env.world_size)):
                way_out = "; to train in one process, unset RANK and WORLD_SIZE" if env.launcher == "torchrun" else ""
                _warn_of_missing_ranks(names, env.world_size, timeout, way_out)
                notice = deadline
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
            continue
        names = _name_missing_ranks(store, env.world_size)
        if not names:  # the last rank has arrived, but not yet set "megatfm/all"
            store.wait(["megatfm/all"], timedelta(seconds=2 * MAX_POLL_SECONDS))
            return
        if env.rank == 0:
            time.sleep(2 * MAX_POLL_SECONDS)
        raise MegatfmError(
            f"rank {names} of {env.world_size} did not start within {timeout.total_seconds():g} s: check its log "
            "or its node"
        )


def _name_missing_ranks(store: dist.Store, world_size: int) -> str:
    """Return the missing ranks as text, "" if there are none.

    Only the first caller checks each rank, and posts the result for the others: if each of 10,000 ranks checked all,
    the store would get 10⁸ requests.
    """
    if store.add("megatfm/looks", 1) > 1:
        store.wait(["megatfm/missing"], MISSING_RANKS_TIMEOUT)
        return store.get("megatfm/missing").decode()
    names = _list_missing_ranks(store, world_size)
    store.set("megatfm/missing", names)
    return names


def _list_missing_ranks(store: dist.Store, world_size: int) -> str:
    return _format_ranks([n for n in range(world_size) if not store.check([f"megatfm/here/{n}"])])


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")


def _warn_of_missing_ranks(names: str, world_size: int, timeout: timedelta, way_out: str = "") -> None:
    text = "rank 0 of %d waits for rank %s, up to %g s: check its log or its node%s"
    log.warning(text, world_size, names, timeout.total_seconds(), way_out)


def _open_store_over_mpi(env: ProcessEnvironment, timeout: timedelta) -> tuple[ProcessEnvironment, dist.Store]:
    """Broadcast the address of rank 0's store over MPI, then finalise MPI: torch needs only the store."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"started by mpirun, but mpi4py can't be used ({take_first_line(error)}): "
            "pip install 'megatfm[mpi]', with an MPI library on the system"
        ) from error
    is_started_here = not MPI.Is_initialized()
    if is_started_here:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the error below is clearer about another MPI
            MPI.Init()
    world = MPI.COMM_WORLD
    if world.size != env.world_size:
        raise UsageError(
            f"mpirun started {env.world_size} processes, but mpi4py sees {world.size}: it loads another MPI library "
            f"({MPI.Get_library_version().split(',')[0].strip()}); point MPI4PY_LIBMPI at the one of this mpirun"
        )
    hosts = world.allgather((get_machine_name(), socket.gethostname()))
    store = None
    address, port, problem = "", 0, None
    if world.rank == 0:
        try:
            address = _find_reachable_address(hosts)
            store = dist.TCPStore(address, 0, world.size, True, timeout, wait_for_workers=False)
            port = store.port
        except (MegatfmError, RuntimeError) as error:
            problem = take_first_line(error)
    address, port, problem = world.bcast((address, port, problem))
    if is_started_here:
        MPI.Finalize()
    if problem is not None:
        raise MegatfmError(f"rank 0 on {hosts[0][1]} can't wait for the others: {problem}")
    if store is None:
        store = dist.TCPStore(address, port, env.world_size, False, timeout)
    return replace(env, address=address, port=port), store


def _find_reachable_address(hosts: Sequence[tuple[str, str]]) -> str:
    """Find an address of this host (rank 0's) that the other hosts can reach.

    hosts: machine id and host name of each rank. The result is the local address of the route to another host, as this
    host's own name may resolve to an unreachable one. Raises MegatfmError if there is none and MASTER_ADDR isn't set.
    """
    (own_machine, name), *_ = hosts
    other_hosts = {host for machine, host in hosts if machine != own_machine}
    if not other_hosts:
        return "127.0.0.1"
    reason = ""
    for other_host in sorted(other_hosts - {name}):
        try:
            for family, kind, _, _, socket_address in socket.getaddrinfo(other_host, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(socket_address)  # UDP: picks the route, sends nothing
                    address = str(probe.getsockname()[0])
                if not address.startswith("fe80:"):  # link-local: useless without an interface
                    return address
        except OSError as error:
            reason = reason or f"{other_host}: {error.strerror or error}"
    if master_address := os.environ.get("MASTER_ADDR"):
        return master_address
    raise MegatfmError(
        f"rank 0 can't find the other hosts by name ({reason or f'all are called {name}'}): set MASTER_ADDR to the "
        "name or address by which they reach rank 0's host, and have mpirun pass it on"
    )


def take_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
