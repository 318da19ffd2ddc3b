"""Feed-forward network, plain or gated (Vaswani et al. 2017, section 3.3; Shazeer 2020)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.dropout import Dropout
from megatfm.layers.ffn.registry import FFNS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata


@FFNS.register("dense")
class FFN(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) ⊙ W_up x) where the activation is gated."""

    tp_plan = (
        ("", "enter"),
        ("w_gate", "column"),
        ("w_up", "column"),
        ("dropout", "keys of own part"),
        ("w_down", "row"),
    )

    cp_plan = "alone"

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        activation, d, d_ff = ACTIVATIONS.get(config.ffn.activation), config.d_model, config.ffn.d_ff
        self.activation, bias = activation, config.ffn.bias
        self.w_gate = Linear(d, d_ff, initial("ffn_gate", d, d_ff), bias=bias) if activation.gated else None
        self.w_up = Linear(d, d_ff, initial("ffn_in", d, d_ff), bias=bias)
        self.dropout = Dropout(config.ffn.dropout, "ffn inner")
        self.w_down = Linear(d_ff, d, initial("ffn_out", d_ff, d), bias=bias)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if self.w_gate is None:
            inner_BTF = self.activation.function(self.w_up(x_BTD))
        else:
            inner_BTF = self.activation(self.w_gate(x_BTD), self.w_up(x_BTD))
        return self.w_down(self.dropout(inner_BTF, sequence))
