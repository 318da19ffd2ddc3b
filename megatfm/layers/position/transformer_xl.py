"""Relative positions as sinusoids (Dai et al. 2019, section 3.3); `attention = "two_stream"` reads them."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.rotary import frequencies

# R relative positions (all that a row of T tokens has, 2T − 1), D model width


class RelativeSinusoids(nn.Module):
    """A vector [D] for every distance query − key, the longest negative one first: all sines, then all cosines."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.width = config.d_model

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """[R, D] in float64."""
        farthest, device = sequence.length - 1, sequence.positions.device
        distances_R = torch.arange(-farthest, farthest + 1, dtype=torch.float64, device=device)
        angles_RH = distances_R[:, None] * frequencies(self.width + self.width % 2, 10_000.0, device)
        return torch.cat((angles_RH.sin(), angles_RH.cos()), dim=-1)[:, : self.width]


TRANSFORMER_XL = POSITIONS.register("transformer_xl")(PositionEncoding(score_bias=RelativeSinusoids))
