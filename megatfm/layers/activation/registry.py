from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatfm.registry import Registry


@dataclass(frozen=True)
class Activation:
    """function: elementwise. gated: the feed-forward network has a second input matrix, whose output it scales; other:
    what is done to that output before."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False
    other: Callable[[Tensor], Tensor] | None = None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Of the two outputs of a gated network."""
        return self.function(gate) * (up if self.other is None else self.other(up))


ACTIVATIONS: Registry[Activation] = Registry("activation")
