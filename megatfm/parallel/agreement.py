"""What ranks tell one another outside of tensors. Each is a collective; without a process group, of one rank."""

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def run_on_rank_0(work: Callable[[], T]) -> T:
    """Do something on rank 0 alone; its result, or what it raised, is every rank's."""
    if not dist.is_initialized():
        return work()
    answer: list[T | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [work()]
        except Exception as error:  # told to all ranks, so that all end with it
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]


def gather(item: T) -> list[T]:
    """The items of all ranks, by rank."""
    if not dist.is_initialized():
        return [item]
    items: list[T] = [item] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def gather_problems(mine: Sequence[str]) -> dict[str, list[str]]:
    """Whoever has problems, as "rank 3 on HOST" → these; empty if all is well, on all ranks alike."""
    everyone = gather((socket.gethostname(), list(mine)))
    return {f"rank {rank} on {host}": problems for rank, (host, problems) in enumerate(everyone) if problems}
