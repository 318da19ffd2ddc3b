"""A decorator for torch.compile that does not import it: importing takes a second, and most commands never compile."""

from collections.abc import Callable
from typing import TypeVar

Marked = TypeVar("Marked", bound=Callable[..., object])


def constant_when_compiled(function: Marked) -> Marked:
    """Mark a function whose result torch.compile treats as a constant: it runs once, during compilation.

    Same effect as `torch.compiler.assume_constant_result`, which imports torch._dynamo to set this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
