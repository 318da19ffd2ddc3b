"""Feed-forward networks: what each token goes through by itself."""

from megatfm.layers.ffn.dense import FFN
from megatfm.layers.ffn.registry import FFNS

__all__ = ["FFN", "FFNS"]
