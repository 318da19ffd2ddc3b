"""Causal self-attention with grouped key and value heads: MHA, GQA and MQA in one (Ainslie et al. 2023)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.linear import Linear
from megatfm.layers.position import POSITIONS
from megatfm.ops.attention import causal_attention
from megatfm.ops.sequence import SequenceLayout

# B batch, T tokens, S keys, D model width, N query heads, K key-value heads, H head width


class CausalCore(nn.Module):
    """Attention between projected heads: the seam at which context parallelism takes over."""

    def forward(self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, layout: SequenceLayout) -> Tensor:
        return causal_attention(q_BNTH, k_BKSH, v_BKSH, layout.causal_mask)


class CausalAttention(nn.Module):
    """Projections around the core. Heads are viewed as −1, so that any number of local heads works."""

    def __init__(self, config: ModelConfig, residual_std: float) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.wq = Linear(config.d_model, config.n_heads * self.head_dim, config.init_std)
        self.wk = Linear(config.d_model, config.kv_heads * self.head_dim, config.init_std)
        self.wv = Linear(config.d_model, config.kv_heads * self.head_dim, config.init_std)
        self.wo = Linear(config.n_heads * self.head_dim, config.d_model, residual_std)
        self.position = POSITIONS.get(config.position)(config)
        self.core = CausalCore()

    def forward(self, x_BTD: Tensor, layout: SequenceLayout, cache: LayerCache | None = None) -> Tensor:
        q_BNTH, k_BKTH, v_BKTH = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        q_BNTH, k_BKSH = self.position(q_BNTH, k_BKTH, layout)
        v_BKSH = v_BKTH
        if cache is not None:
            k_BKSH, v_BKSH = cache.extend(k_BKSH, v_BKTH)
        heads_BNTH = self.core(q_BNTH, k_BKSH, v_BKSH, layout)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))
