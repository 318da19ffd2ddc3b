"""A mark for torch.compile that does not import it: that is a second of start-up, and most commands never compile."""

from collections.abc import Callable
from typing import TypeVar

Marked = TypeVar("Marked", bound=Callable[..., object])


def constant_when_compiled(function: Marked) -> Marked:
    """The function is called once, while what calls it is compiled; what it gave stands in the compiled code.

    As `torch.compiler.assume_constant_result`, which sets this attribute, too, after importing torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
