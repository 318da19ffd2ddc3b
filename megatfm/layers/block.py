"""A transformer block: self-attention, in decoders of a memory cross-attention, and a feed-forward network."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import ATTENTIONS, LayerCache
from megatfm.layers.attention.patterns import PATTERNS, Memory
from megatfm.layers.extra import Extra, Extras
from megatfm.layers.ffn import FFNS
from megatfm.layers.initialisation import Stack, initialiser
from megatfm.layers.residual import RESIDUALS
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, S tokens of the memory, D model width


class Block(nn.Module):
    """Sublayers around a residual stream, as the config has them at this depth. cross: it also attends to a memory.

    In a decoder no token sees later ones.
    """

    def __init__(self, config: ModelConfig, stack: Stack, depth: int = 0, *, cross: bool = False) -> None:
        super().__init__()
        self.depth, self.kind, config = depth, config.kind(depth), config.at(depth)
        initial, residual = initialiser(config, stack), RESIDUALS.get(config.norm.placement)
        first = RESIDUALS.get("none") if depth == 0 and not config.norm.first else residual
        self.attn_residual = first(config, "attention residual", stack)
        pattern = PATTERNS.get(config.attention.pattern.name)(config, stack == "decoder").at_depth(depth)
        self.attn = ATTENTIONS.get(config.attention.name)(config, initial, pattern)
        if cross:
            self.cross_residual = residual(config, "cross residual", stack)
            self.cross = ATTENTIONS.get(config.attention.name)(config, initial, Memory())
        self.ffn_residual = residual(config, "ffn residual", stack)
        self.ffn = FFNS.get(config.ffn.name)(config, initial)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor | Extra:
        """[B, T, D], or an Extra; bias: what the stack shares among its layers, numbers for all pairs
        or a projection."""
        extras = Extras()
        y_BTD = extras.take("attn", self.attn(self.attn_residual.before(x_BTD), sequence, bias, None, cache))
        x_BTD = self.attn_residual.after(x_BTD, y_BTD, sequence)
        if memory_BSD is not None:
            made = self.cross(self.cross_residual.before(x_BTD), sequence, None, memory_BSD, cache)
            y_BTD = extras.take("cross", made)
            x_BTD = self.cross_residual.after(x_BTD, y_BTD, sequence)
        y_BTD = extras.take("ffn", self.ffn(self.ffn_residual.before(x_BTD), sequence))
        return extras.beside(self.ffn_residual.after(x_BTD, y_BTD, sequence))
