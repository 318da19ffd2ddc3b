"""What ranks tell one another outside of tensors: all succeed, or all fail with the same reason.

Each function is a collective of the process group that it takes (None: the default one, or no others at all). A save
in the background has a group of its own, so that what it says never mixes with what training says.
"""

import pickle
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
"""Host, and the one line that it says."""


def is_distributed() -> bool:
    """Whether this process works with others."""
    return dist.is_available() and dist.is_initialized()


def rank(group: Group = None) -> int:
    """This process's number, 0 where it is alone."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: Group = None) -> int:
    """How many processes work together."""
    return dist.get_world_size(group) if is_distributed() else 1


def run_on_all_ranks(action: str, work: Callable[[], T], group: Group = None) -> T:
    """Do local work on every rank; where it fails on any, raise the first failed one's reason on all."""
    result, cause, reason = _try(work)
    reasons: list[Failure | None] = [reason]
    if is_distributed():
        reasons *= dist.get_world_size(group)
        with collective_errors(action):
            dist.all_gather_object(reasons, reasons[0], group)
    _raise_if(action, reasons, cause)
    return cast(T, result)


def run_and_gather(action: str, work: Callable[[], T], group: Group = None) -> list[T]:
    """The same; rank 0 gets every rank's result, the others none."""
    if not is_distributed():
        return [run_on_all_ranks(action, work, group)]
    result, cause, reason = _try(lambda: pickle.dumps(work()))
    first = rank(group) == 0
    answers: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    with collective_errors(action):
        dist.gather_object((result, reason), answers, group=group, group_dst=0)
        told = [[reason for _, reason in answers] if answers else None]
        dist.broadcast_object_list(told, group=group, group_src=0)
    _raise_if(action, told[0] or [], cause)
    return [pickle.loads(result) for result, _ in answers or ()]


def all_gather(mine: T, group: Group = None) -> list[T]:
    """What each rank has, by rank."""
    if not is_distributed():
        return [mine]
    theirs: list[Any] = [None] * dist.get_world_size(group)
    with collective_errors("the ranks can't compare what they have"):
        dist.all_gather_object(theirs, mine, group)
    return theirs


def broadcast_each(mine: T, holders: int, group: Group = None) -> list[T]:
    """What each of the first so many ranks has, by rank; the others' is not looked at."""
    told: list[Any] = []
    for holder in range(holders):
        each = [mine]
        with collective_errors("the ranks can't tell each other what they have read"):
            dist.broadcast_object_list(each, group=group, group_src=holder)
        told += each
    return told


def gather_errors(mine: Sequence[str]) -> dict[str, list[str]]:
    """Whoever has problems, as "rank 3 on HOST" → these; empty if all is well, on all ranks alike."""
    everyone = all_gather((socket.gethostname(), list(mine)))
    return {f"rank {rank} on {host}": problems for rank, (host, problems) in enumerate(everyone) if problems}


def machine() -> str:
    """What tells this machine, or container, from the others of a run: several may be called localhost."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def unique_on_host(mine: Collection[str], group: Group = None) -> set[str]:
    """Of these, those that no other rank on this rank's machine has."""
    host, me = machine(), rank(group)
    others: set[str] = set()
    for other, (where, its) in enumerate(all_gather((host, list(mine)), group)):
        if where == host and other != me:
            others.update(its)
    return set(mine) - others


def run_on_rank_0(action: str, work: Callable[[], T], group: Group = None) -> T:
    """Do work on rank 0; all ranks are told its result, or raise its reason."""
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
    """The same, but what it raises is raised on all ranks as it is, if other processes can have it."""
    if not is_distributed():
        return work()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer = [pickle.dumps(work()), None]
        except Exception as error:  # told to all ranks, so that all end with it
            answer = [None, _for_others(error)]
    with collective_errors("rank 0 can't say what it found"):
        dist.broadcast_object_list(answer)
    result, failure = answer
    if failure is not None:
        raise failure
    return cast(T, pickle.loads(result))


def scatter(action: str, parts: list[T], group: Group = None) -> T:
    """Give each rank its own of rank 0's parts (those of the others are ignored)."""
    if not is_distributed():
        return parts[0]
    mine: list[Any] = [None]
    with collective_errors(action):
        dist.scatter_object_list(mine, parts if rank(group) == 0 else None, group=group, group_src=0)
    return cast(T, mine[0])


def any_rank(action: str, mine: bool, group: Group = None) -> bool:
    """Whether it is so on any rank."""
    if not is_distributed():
        return mine
    flag = torch.tensor([int(mine)])
    with collective_errors(action):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


@contextmanager
def collective_errors(action: str) -> Iterator[None]:
    """Turn what a collective raises when a rank is gone into a MegatfmError."""
    try:
        yield
    except RuntimeError as error:
        raise MegatfmError(f"{action}: the ranks lost each other: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return an error's first line (torch adds stacks to its own); the type says more where it isn't ours."""
    text = str(error).strip().split("\n", 1)[0]
    return text if isinstance(error, MegatfmError) else f"{type(error).__name__}: {text}"


def _for_others(error: Exception) -> Exception:
    """An error as other processes can raise it: itself where pickle gives it back, else its type and text."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its constructor or its values do
        return MegatfmError(one_line(error))
    same = type(again) is type(error) and str(again) == str(error)
    return error if same else MegatfmError(one_line(error))


def _try(work: Callable[[], T]) -> tuple[T | None, Exception | None, Failure | None]:
    try:
        return work(), None, None
    except Exception as error:
        return None, error, (socket.gethostname(), one_line(error))


def _raise_if(action: str, reasons: list[Failure | None], cause: Exception | None) -> None:
    if failures := {rank: reason for rank, reason in enumerate(reasons) if reason is not None}:
        raise _failure(action, failures) from cause


def _failure(action: str, reasons: Mapping[int, Failure]) -> MegatfmError:
    """The error that every rank raises: the lowest failed rank's reason, and who failed besides."""
    first, *others = sorted(reasons)
    host, text = reasons[first]
    where = f"rank {first} on {host}: " if is_distributed() else ""
    besides = f" (also failed: rank {', '.join(map(str, others))})" if others else ""
    return MegatfmError(f"{action}: {where}{text}{besides}")
