"""Sinusoidal positions (Vaswani et al. 2017, section 3.5)."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.rotary import frequencies

# B batch, T tokens, D embedding width


class SinusoidalPositions(nn.Module):
    """sin and cos of position · 10000^(−2i/D) in channels 2i and 2i + 1, as the paper has them."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.width = config.embedding_width

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """[B, T, D] in float32, or in float64 where that is torch's default."""
        positions_BT1 = sequence.positions[..., None].double()
        angles_BTH = positions_BT1 * frequencies(self.width + self.width % 2, 10_000.0, positions_BT1.device)
        table_BTD = torch.stack((angles_BTH.sin(), angles_BTH.cos()), dim=-1).flatten(-2)
        return table_BTD[..., : self.width]


SINUSOIDAL = POSITIONS.register("sinusoidal")(PositionEncoding(absolute=SinusoidalPositions))
