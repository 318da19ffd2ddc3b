"""Attention whose heads are gated (Qiu et al. 2025, arXiv 2505.06708): σ(x W) scales the output of each head."""

from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention, HeadProjections
from megatfm.layers.attention.kv_cache import update_cache
from megatfm.layers.linear import Linear
from megatfm.layers.position import POSITIONS


@ATTENTIONS.register("gated")
class GatedAttention(HeadProjections):
    """Wo (σ(x W) ⊙ attention(x)), with one gate for each token and head."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("gate", "colwise"), ("wo", "rowwise"))
    cp_plan = "local"

    def __init__(self, config, initial, pattern):
        super().__init__(config, initial, bias=False)
        d, n_heads = config.d_model, config.attention.n_heads
        self.gate = Linear(d, n_heads, initial("dense", d, n_heads))
        rotary = POSITIONS.get(config.position.name).rotary
        self.position = rotary(config, initial) if rotary else None
        self.core, self.pattern = DotProductAttention(config, initial, pattern), pattern

    def forward(self, x_BTD, sequence, bias=None, memory_BSD=None, cache=None):
        projected = (project(x_BTD) for project in (self.wq, self.wk, self.wv))
        q_BNTH, k_BKTH, v_BKTH = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if self.position is not None:
            q_BNTH, k_BKTH = self.position(q_BNTH, k_BKTH, sequence)
        if cache is not None:
            k_BKTH, v_BKTH, sequence = update_cache(cache, k_BKTH, v_BKTH, self.pattern, sequence)
        heads_BTNH = self.core(q_BNTH, k_BKTH, v_BKTH, sequence, bias).transpose(1, 2)
        gates_BTN1 = self.gate(x_BTD).sigmoid()[..., None]
        return self.wo((gates_BTN1 * heads_BTNH).flatten(2))
