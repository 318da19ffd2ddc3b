from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.initialisation import Initialiser
from megatfm.registry import Registry

ATTENTIONS: Registry[Callable[[ModelConfig, Initialiser, AttentionPattern], nn.Module]] = Registry(
    "attention"
)
"""Called with x [B, T, D], sequence, bias, memory, cache; see `heads.py`."""
