from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.ops.sequence import Sight
from megatfm.registry import Registry

ATTENTIONS: Registry[Callable[[ModelConfig, Initialiser, Sight], nn.Module]] = Registry("attention")
"""Called with x [B, T, D], layout, bias, memory, cache; see `heads.py`."""
