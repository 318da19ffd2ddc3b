from collections.abc import Callable

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.registry import Registry

PATTERNS: Registry[Callable[[ModelConfig, bool], AttentionPattern]] = Registry("attention pattern")
"""Made as `PATTERNS.get(name)(config, causal)`; causal: in a decoder, whose queries must not see later tokens."""
