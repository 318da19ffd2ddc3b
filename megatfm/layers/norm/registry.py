from collections.abc import Callable

from torch import nn

from megatfm.config import ModelConfig
from megatfm.registry import Registry

NORMS: Registry[Callable[..., nn.Module]] = Registry("norm")
"""Normalisation layers, made as `NORMS.get(name)(width, eps)`; options of its own come as further named arguments."""


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """A norm of the model's kind; width: left out, that of the residual stream."""
    options = config.norm
    return NORMS.get(options.name)(width or config.d_model, options.eps, **options.options)
