from collections.abc import Callable

from torch import nn

from megatfm.registry import Registry

NORMS: Registry[Callable[[int, float], nn.Module]] = Registry("norm")
