from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.registry import Registry

MODELS: Registry[Callable[[ModelConfig], nn.Module]] = Registry("model family (model.family)")
