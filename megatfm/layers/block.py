"""A transformer block: self-attention, in decoders of a memory cross-attention, and a feed-forward network."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import ATTENTIONS, LayerCache
from megatfm.layers.attention.patterns import PATTERNS, CrossAttentionPattern
from megatfm.layers.extra import AuxiliaryCollector, BlockOutput
from megatfm.layers.ffn import FFNS
from megatfm.layers.initialisation import StackKind, initialiser
from megatfm.layers.residual import RESIDUALS
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, S tokens of the memory, D model width


class Block(nn.Module):
    """Sublayers around a residual stream, as the config has them at this depth. cross: it also attends to a memory.

    In a decoder no token sees later ones.
    """

    def __init__(self, config: ModelConfig, stack: StackKind, depth: int = 0, *, cross: bool = False) -> None:
        super().__init__()
        self.depth, self.kind, config = depth, config.layer_type_at(depth), config.layer_config(depth)
        initial, residual = initialiser(config, stack), RESIDUALS.get(config.norm.placement)
        first = RESIDUALS.get("none") if depth == 0 and not config.norm.first_attention_norm else residual
        self.attn_residual = first(config, "attention residual", stack)
        pattern = PATTERNS.get(config.attention.pattern.name)(config, stack == "decoder").at_depth(depth)
        self.attn = ATTENTIONS.get(config.attention.name)(config, initial, pattern)
        if cross:
            self.cross_residual = residual(config, "cross residual", stack)
            self.cross = ATTENTIONS.get(config.attention.name)(config, initial, CrossAttentionPattern())
        self.ffn_residual = residual(config, "ffn residual", stack)
        self.ffn = FFNS.get(config.ffn.name)(config, initial)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor | BlockOutput:
        """[B, T, D], or an Extra; bias: what the stack shares among its layers, numbers for all pairs
        or a projection."""
        extras = AuxiliaryCollector()
        y_BTD = extras.unwrap(
            "attn", self.attn(self.attn_residual.input_norm(x_BTD), sequence, bias, None, cache)
        )
        x_BTD = self.attn_residual.add(x_BTD, y_BTD, sequence)
        if memory_BSD is not None:
            made = self.cross(self.cross_residual.input_norm(x_BTD), sequence, None, memory_BSD, cache)
            y_BTD = extras.unwrap("cross", made)
            x_BTD = self.cross_residual.add(x_BTD, y_BTD, sequence)
        y_BTD = extras.unwrap("ffn", self.ffn(self.ffn_residual.input_norm(x_BTD), sequence))
        return extras.wrap(self.ffn_residual.add(x_BTD, y_BTD, sequence))
