"""Attention between projected heads: the seam at which context parallelism takes over."""

from torch import Tensor, nn

from megatfm.config import ModelConfig, ScaledAttention, expect
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.ops.attention import Variant, attention
from megatfm.ops.sequence import SequenceLayout, Sight

# B batch, N query heads, K key-value heads, T queries, S keys, H head width


class Core(nn.Module):
    """softmax(q kᵀ · scale + bias) v over what the layout lets each query see."""

    def __init__(
        self, config: ModelConfig, initial: Initialiser, sight: Sight, *, scale: float | None = None
    ) -> None:
        super().__init__()
        self.sight: Sight = sight
        options = expect(config.attention, ScaledAttention, "model.attention")
        self.dropout = Dropout(options.dropout, "attention" if sight != "cross" else "cross")
        self.variant = Variant(
            causal=sight == "causal",
            scale=options.scale or scale,
            softcap=options.softcap,
            dropout=options.dropout,
        )

    def forward(
        self,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        layout: SequenceLayout,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[B, N, T, H]; bias broadcasts to [B, N, T, S]."""
        keys = self.dropout.head_keys(layout, q_BNTH.shape[1])
        return attention(q_BNTH, k_BKSH, v_BKSH, layout.mask(self.sight), bias, self.variant, keys)
