"""Rotary positions (Su et al. 2021)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.position.registry import POSITIONS
from megatfm.ops.rotary import rotary_table, rotate
from megatfm.ops.sequence import SequenceLayout

# B batch, N query heads, K key-value heads, T tokens, H head width


@POSITIONS.register("rope")
class Rope(nn.Module):
    """Turns queries and keys by their positions; any number of heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_width, config.rope_theta

    def forward(self, q_BNTH: Tensor, k_BKTH: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        key = ("rope", self.head_dim, self.theta)
        cos, sin = layout.once(key, lambda: rotary_table(layout.positions, self.head_dim, self.theta))
        return rotate(q_BNTH, cos, sin), rotate(k_BKTH, cos, sin)
