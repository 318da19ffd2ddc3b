"""Gated feed-forward network (Shazeer 2020)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.linear import Linear


class GatedFFN(nn.Module):
    """W_down activation(W_gate x, W_up x)."""

    def __init__(self, config: ModelConfig, residual_std: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS.get(config.activation)
        self.w_gate = Linear(config.d_model, config.d_ff, config.init_std)
        self.w_up = Linear(config.d_model, config.d_ff, config.init_std)
        self.w_down = Linear(config.d_ff, config.d_model, residual_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w_down(self.activation(self.w_gate(x_BTD), self.w_up(x_BTD)))
