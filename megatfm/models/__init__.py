"""Architectures, as lists of named steps. `build(config)` makes the one that a config names."""

from torch import nn

from megatfm.config import ModelConfig
from megatfm.models.decoder import Decoder
from megatfm.models.electra import Electra
from megatfm.models.encoder import Encoder
from megatfm.models.encoder_decoder import EncoderDecoder
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.scales import lr_scales
from megatfm.models.xlnet import XLNet


def build(config: ModelConfig) -> nn.Module:
    """The model of a config, on the current default device (use `torch.device("meta")` to allocate nothing)."""
    return MODELS.get(config.family)(config)


__all__ = [
    "MODELS",
    "Decoder",
    "Electra",
    "Encoder",
    "EncoderDecoder",
    "Output",
    "XLNet",
    "build",
    "lr_scales",
]
