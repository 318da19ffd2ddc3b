"""Architectures: each family's forward from embedding to losses. `build(config)` makes the one that a config names."""

from torch import nn

from megatfm.config import ModelConfig
from megatfm.models.base import MODELS, Model, Output
from megatfm.models.electra import Discriminator, Electra
from megatfm.models.mup import lr_scales
from megatfm.models.transformer import Decoder, Encoder, EncoderDecoder
from megatfm.models.xlnet import XLNet


def build(config: ModelConfig) -> nn.Module:
    """The model of a config, on the current default device (use `torch.device("meta")` to allocate nothing)."""
    return MODELS.get(config.family)(config)


__all__ = [
    "MODELS",
    "Decoder",
    "Discriminator",
    "Electra",
    "Encoder",
    "EncoderDecoder",
    "Model",
    "Output",
    "XLNet",
    "build",
    "lr_scales",
]
