"""Which part of a backward pass that is taken in two is under way, for functions that compute both at once.

A variable of the process and not of a thread: on a GPU, autograd runs functions in threads of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

BackwardPart = Literal["inputs", "weights"]

_UNDER_WAY: list[BackwardPart] = []


@contextmanager
def under_way(part: BackwardPart) -> Iterator[None]:
    """Marks the calls of autograd that are a part of a backward pass; without it, a pass is whole."""
    _UNDER_WAY.append(part)
    try:
        yield
    finally:
        _UNDER_WAY.pop()


def current_part() -> BackwardPart | None:
    """The part that is under way; None in a whole pass."""
    return _UNDER_WAY[-1] if _UNDER_WAY else None
