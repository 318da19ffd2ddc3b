from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.registry import Registry

FFNS: Registry[Callable[[ModelConfig, Initialiser], nn.Module]] = Registry("feed-forward network")
"""Called with x [B, T, D] and sequence; see `dense.py`."""
