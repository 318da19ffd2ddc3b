"""Collectives of Python objects, and functions that run on ranks and raise the same error on all if any fails.

Each function is a collective of the given process group (None: the default group, or a single process without one). A
background save uses its own group, so that its messages don't mix with those of training.
"""

import pickle
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatfm.errors import MegatfmError

T = TypeVar("T")
Group = dist.ProcessGroup | None
Failure = tuple[str, str]
"""Host name and error message of a failed rank."""


def is_distributed() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def rank(group: Group = None) -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: Group = None) -> int:
    """Return the number of processes of a group, 1 without one."""
    return dist.get_world_size(group) if is_distributed() else 1


def run_on_all_ranks(action: str, work: Callable[[], T], group: Group = None) -> T:
    """Run `work` on every rank and return its result; if it fails on any rank, raise the first failure on all."""
    result, cause, reason = _try(work)
    reasons: list[Failure | None] = [reason]
    if is_distributed():
        reasons *= dist.get_world_size(group)
        with collective_errors(action):
            dist.all_gather_object(reasons, reasons[0], group)
    _raise_if(action, reasons, cause)
    return cast(T, result)


def run_and_gather(action: str, work: Callable[[], T], group: Group = None) -> list[T]:
    """Run `work` on every rank and gather the results on rank 0 (the others get none); raise on all if any failed."""
    if not is_distributed():
        return [run_on_all_ranks(action, work, group)]
    result, cause, reason = _try(lambda: pickle.dumps(work()))
    is_rank_0 = rank(group) == 0
    results_and_failures: list[Any] | None = [None] * dist.get_world_size(group) if is_rank_0 else None
    with collective_errors(action):
        dist.gather_object((result, reason), results_and_failures, group=group, group_dst=0)
        reasons = [[reason for _, reason in results_and_failures] if results_and_failures else None]
        dist.broadcast_object_list(reasons, group=group, group_src=0)
    _raise_if(action, reasons[0] or [], cause)
    return [pickle.loads(result) for result, _ in results_and_failures or ()]


def gather_from(action: str, value: T, senders: Sequence[int], group: Group = None) -> list[T]:
    """Gather the objects of some ranks on rank 0, in order of `senders`; other ranks get an empty list.

    Sends each object at its own size. `gather_object` would pad all objects to the size of the largest.
    """
    received: list[T] = []
    for sender in senders:
        slot: list[Any] = [value]
        if sender != 0 and rank(group) in (0, sender):
            with collective_errors(action):
                if rank(group) == sender:
                    dist.send_object_list(slot, group=group, group_dst=0)
                else:
                    dist.recv_object_list(slot, group=group, group_src=sender)
        if rank(group) == 0:
            received += slot
    return received


def all_gather_object(value: T, group: Group = None) -> list[T]:
    """All-gather an object; return a list by rank."""
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with collective_errors("the ranks can't exchange values"):
        dist.all_gather_object(gathered, value, group)
    return gathered


def broadcast_each(value: T, n_holders: int, group: Group = None) -> list[T]:
    """Broadcast the objects of ranks 0 … `n_holders` − 1 to all ranks; return a list by rank."""
    objects: list[Any] = []
    for holder in range(n_holders):
        slot = [value]
        with collective_errors("the ranks can't exchange what they have read"):
            dist.broadcast_object_list(slot, group=group, group_src=holder)
        objects += slot
    return objects


def broadcast_from(action: str, value: T, source: int, group: Group = None) -> T:
    """Broadcast the object of one rank to all."""
    if not is_distributed():
        return value
    slot = [value]
    with collective_errors(action):
        dist.broadcast_object_list(slot, group=group, group_src=source)
    return slot[0]


def gather_errors(value: Sequence[str]) -> dict[str, list[str]]:
    """All-gather lists of problems; return "rank 3 on HOST" → problems, for ranks that have any."""
    per_rank = all_gather_object((socket.gethostname(), list(value)))
    return {f"rank {rank} on {host}": problems for rank, (host, problems) in enumerate(per_rank) if problems}


def get_machine_name() -> str:
    """Return a unique name of this machine or container. Host names are not unique: several may be "localhost"."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def unique_on_host(value: Collection[str], group: Group = None) -> set[str]:
    """Return those items that no other rank on this rank's machine has."""
    host, own_rank = get_machine_name(), rank(group)
    on_other_ranks: set[str] = set()
    for peer, (peer_host, items) in enumerate(all_gather_object((host, list(value)), group)):
        if peer_host == host and peer != own_rank:
            on_other_ranks.update(items)
    return set(value) - on_other_ranks


def run_on_rank_0(action: str, work: Callable[[], T], group: Group = None) -> T:
    """Run `work` on rank 0 and broadcast its result; raise its reason on all ranks."""
    if not is_distributed():
        return run_on_all_ranks(action, work, group)
    answer: list[Any] = [None]
    cause = None
    if rank(group) == 0:
        result, cause, reason = _try(lambda: pickle.dumps(work()))
        answer = [(result, reason)]
    with collective_errors(action):
        dist.broadcast_object_list(answer, group=group, group_src=0)
    result, reason = answer[0]
    _raise_if(action, [reason], cause)
    return cast(T, pickle.loads(result))


def run_on_rank_0_raising(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and broadcast its result; raise its own exception on all ranks, if that can be pickled."""
    if not is_distributed():
        return work()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer = [pickle.dumps(work()), None]
        except Exception as error:  # broadcast, so that all ranks end with it
            answer = [None, _make_portable(error)]
    with collective_errors("rank 0 can't send its result"):
        dist.broadcast_object_list(answer)
    result, failure = answer
    if failure is not None:
        raise failure
    return cast(T, pickle.loads(result))


def any_rank(action: str, value: bool, group: Group = None) -> bool:
    """Return whether a condition holds on any rank."""
    if not is_distributed():
        return value
    flag = torch.tensor([int(value)])
    with collective_errors(action):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


@contextmanager
def collective_errors(action: str) -> Iterator[None]:
    """Context manager that turns the error of a collective whose peer is gone into a MegatfmError."""
    try:
        yield
    except RuntimeError as error:
        way_out = "the rank whose log ends first is the one to look at"
        raise MegatfmError(f"{action}: the ranks lost each other: {format_error_line(error)}: {way_out}") from error


def format_error_line(error: BaseException) -> str:
    """Return an error's first line, since torch appends stacks; with its type unless it is a MegatfmError."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip().split("\n", 1)[0])  # without gloo's file and line
    return text if isinstance(error, MegatfmError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _make_portable(error: Exception) -> Exception:
    """Return an error that other processes can raise: the error itself if it survives pickling, else a MegatfmError."""
    try:
        restored = pickle.loads(pickle.dumps(error))
    except Exception:  # constructors of third-party errors may raise anything
        return MegatfmError(format_error_line(error))
    is_equal = type(restored) is type(error) and str(restored) == str(error)
    return error if is_equal else MegatfmError(format_error_line(error))


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None, Failure | None]:
    try:
        return work(), None, None
    except Exception as error:
        return None, error, (socket.gethostname(), format_error_line(error))


def _raise_if(action: str, reasons: list[Failure | None], cause: Exception | None) -> None:
    if failures := {rank: reason for rank, reason in enumerate(reasons) if reason is not None}:
        raise _make_failure(action, failures) from cause


def _make_failure(action: str, reasons: Mapping[int, Failure]) -> MegatfmError:
    """Return the error that every rank raises: the lowest failed rank's message, and the other failed ranks."""
    first, *more_ranks = sorted(reasons)
    host, text = reasons[first]
    location = f"rank {first} on {host}: " if is_distributed() else ""
    more_failures = f" (also failed: rank {', '.join(map(str, more_ranks))})" if more_ranks else ""
    return MegatfmError(f"{action}: {location}{text}{more_failures}")
