from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatfm.registry import Registry


@dataclass(frozen=True)
class Activation:
    """function: elementwise. gated: the feed-forward network has a second input matrix, whose output it scales."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False


ACTIVATIONS: Registry[Activation] = Registry("activation")
