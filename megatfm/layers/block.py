"""A transformer block: attention and feed-forward network around a residual stream."""

from collections.abc import Callable

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import CausalAttention, LayerCache
from megatfm.layers.ffn import GatedFFN
from megatfm.layers.norm import NORMS
from megatfm.ops.sequence import SequenceLayout
from megatfm.registry import Registry

BLOCKS: Registry[Callable[[ModelConfig], nn.Module]] = Registry("norm_position")


@BLOCKS.register("pre")
class PreNormBlock(nn.Module):
    """x + S(N(x)) for both sublayers (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Radford et al. 2019, section 2.3: residual projections start smaller, by the number of residual layers.
        residual_std = config.init_std * (2 * config.n_layers) ** -0.5
        norm = NORMS.get(config.norm)
        self.norm1 = norm(config.d_model, config.norm_eps)
        self.attn = CausalAttention(config, residual_std)
        self.norm2 = norm(config.d_model, config.norm_eps)
        self.ffn = GatedFFN(config, residual_std)

    def forward(self, x_BTD: Tensor, layout: SequenceLayout, cache: LayerCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), layout, cache)
        return x_BTD + self.ffn(self.norm2(x_BTD))
