from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.registry import Registry

POSITIONS: Registry[Callable[[ModelConfig], nn.Module]] = Registry("position")
