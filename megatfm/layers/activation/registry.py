from collections.abc import Callable

from torch import Tensor

from megatfm.registry import Registry

Activation = Callable[[Tensor, Tensor], Tensor]
"""Takes gate and value, each [..., d_ff]."""

ACTIVATIONS: Registry[Activation] = Registry("activation")
