"""Log lines that appear once a process, also from code that torch.compile compiles."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Marked = TypeVar("Marked", bound=Callable[..., object])
log = logging.getLogger("megatfm")


def constant_when_compiled(function: Marked) -> Marked:
    """Mark a function whose result torch.compile treats as a constant: it runs once, during compilation.

    Same effect as `torch.compiler.assume_constant_result`, which imports torch._dynamo to set this attribute. The
    import takes a second, and most commands never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_LOGGED: set[str] = set()
_is_muted = False


def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message, unless this process has logged the same one before, or `mute_log_once` is entered."""
    if message not in _LOGGED and not _is_muted:
        _LOGGED.add(message)
        log.log(level, message)


@contextmanager
def mute_log_once() -> Iterator[None]:
    """Drop such messages, as of tensors that have shapes alone, and are on another device than a run's."""
    global _is_muted
    was_muted, _is_muted = _is_muted, True
    try:
        yield
    finally:
        _is_muted = was_muted
