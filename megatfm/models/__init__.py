"""Architectures: a loop over blocks, no more. `build(config)` makes the one that a config names."""

from megatfm.models.decoder import Decoder, Output, build

__all__ = ["Decoder", "Output", "build"]
