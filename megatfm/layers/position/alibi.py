"""Attention with linear biases (Press et al. 2022)."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.initial import FixedValues

# N heads, T queries, S keys


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """2^(−8i/n) for a power of two; else those of the power below, then every other one of the next power's."""
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]
    return (*slopes, *between)


class Alibi(nn.Module):
    """−slope · |query − key|; the slopes are a buffer with a heads dimension."""

    tp_plan = (("", "last dim"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.slopes: Tensor
        self.register_buffer("slopes", torch.empty(config.attention.n_heads), persistent=False)
        self.initial = {"slopes": FixedValues(alibi_slopes(config.attention.n_heads))}

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """For each distance, [N, T + S − 1] (`SequenceMetadata.unique_relative_positions`)."""
        return -self.slopes[:, None] * sequence.unique_relative_positions().abs()


ALIBI = POSITIONS.register("alibi")(PositionEncoding(score_bias=Alibi))
