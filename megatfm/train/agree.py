"""What rank 0 finds out, all ranks are told: the result, or the error that all then end with."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def told_by_rank_0(work: Callable[[], T]) -> T:
    """Do something on rank 0 alone; its result, or what it raised, is every rank's. A collective."""
    if not dist.is_initialized():
        return work()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [work()]
        except Exception as error:  # told to all ranks, so that all end with it
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
