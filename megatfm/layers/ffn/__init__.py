"""Feed-forward networks: what each token goes through by itself."""

from megatfm.layers.ffn.dense import FFN
from megatfm.layers.ffn.registry import FFNS

import megatfm.layers.moe  # noqa: F401  # isort: skip  # registers itself, and knows the dense network

__all__ = ["FFN", "FFNS"]
