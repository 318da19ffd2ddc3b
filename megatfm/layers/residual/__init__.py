"""Where the norms stand around a sublayer."""

from megatfm.layers.residual import deepnorm, none, post, pre, sandwich
from megatfm.layers.residual.registry import RESIDUALS, Residual

__all__ = ["RESIDUALS", "Residual", "deepnorm", "none", "post", "pre", "sandwich"]
