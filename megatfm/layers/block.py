"""A transformer block: self-attention, in decoders of a memory cross-attention, and a feed-forward network."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import ATTENTIONS, LayerCache
from megatfm.layers.ffn import FFN
from megatfm.layers.initialisation import Stack, initialiser
from megatfm.layers.residual import RESIDUALS
from megatfm.ops.sequence import SequenceLayout, Sight

# B batch, T tokens, S tokens of the memory, D model width


class Block(nn.Module):
    """Sublayers around a residual stream; sight: what its self-attention sees; cross: it also attends to a memory."""

    def __init__(self, config: ModelConfig, stack: Stack, sight: Sight, *, cross: bool = False) -> None:
        super().__init__()
        initial, residual = initialiser(config, stack), RESIDUALS.get(config.norm.placement)
        self.attn_residual = residual(config, "attention residual", stack)
        self.attn = ATTENTIONS.get(config.attention.name)(config, initial, sight)
        if cross:
            self.cross_residual = residual(config, "cross residual", stack)
            self.cross = ATTENTIONS.get(config.attention.name)(config, initial, "cross")
        self.ffn_residual = residual(config, "ffn residual", stack)
        self.ffn = FFN(config, initial)

    def forward(
        self,
        x_BTD: Tensor,
        layout: SequenceLayout,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]; bias: what the stack's position encoding shares among its layers."""
        y_BTD = self.attn(self.attn_residual.before(x_BTD), layout, bias, None, cache)
        x_BTD = self.attn_residual.after(x_BTD, y_BTD, layout)
        if memory_BSD is not None:
            y_BTD = self.cross(self.cross_residual.before(x_BTD), layout, None, memory_BSD, cache)
            x_BTD = self.cross_residual.after(x_BTD, y_BTD, layout)
        y_BTD = self.ffn(self.ffn_residual.before(x_BTD), layout)
        return self.ffn_residual.after(x_BTD, y_BTD, layout)
