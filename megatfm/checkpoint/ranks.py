"""All ranks succeed, or all fail with the same one-line reason."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatfm.errors import MegatfmError

T = TypeVar("T")


def in_group() -> bool:
    """Whether this process works with others."""
    return dist.is_available() and dist.is_initialized()


def together(what: str, work: Callable[[], T]) -> T:
    """Do local work on every rank; where it fails on any, raise the first failed one's reason on all."""
    result: T | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
    reasons = [None if cause is None else one_line(cause)]
    if in_group():
        reasons *= dist.get_world_size()
        dist.all_gather_object(reasons, reasons[0])
    if failures := {rank: text for rank, text in enumerate(reasons) if text is not None}:
        raise failure(what, failures) from cause
    return cast(T, result)


@contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises into a MegatfmError, and keep it from warning about one process.

    CheckpointException is no Exception, so nothing above would catch it. A lost peer shows as a RuntimeError of
    the collective.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
            yield
    except CheckpointException as error:
        raise failure(what, {rank: one_line(cause) for rank, (cause, _) in error.failures.items()}) from error
    except RuntimeError as error:
        raise MegatfmError(f"{what}: the ranks lost each other: {one_line(error)}") from error


def failure(what: str, reasons: Mapping[int, str]) -> MegatfmError:
    """Return the error that every rank raises: the lowest failed rank's reason, and who failed besides."""
    first, *others = sorted(reasons)
    where = f"rank {first}: " if in_group() else ""
    besides = f" (also failed: rank {', '.join(map(str, others))})" if others else ""
    return MegatfmError(f"{what}: {where}{reasons[first]}{besides}")


def one_line(error: BaseException) -> str:
    """Return an error's first line (torch adds stacks to its own); the type says more where it isn't ours."""
    text = str(error).strip().split("\n", 1)[0]
    return text if isinstance(error, MegatfmError) else f"{type(error).__name__}: {text}"
