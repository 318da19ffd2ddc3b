"""Attention with grouped key and value heads: MHA, GQA and MQA in one (Ainslie et al. 2023)."""

from torch import Tensor, nn

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention, HeadProjections
from megatfm.layers.attention.kv_cache import LayerCache, update_cache
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.norm import RMSNorm, ShardedRMSNorm, make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.mask import slice_last_keys

# B batch, T tokens, S keys, D model width, N query heads, K key-value heads, H head width


@ATTENTIONS.register("gqa")
class GroupedQueryAttention(HeadProjections):
    """Projections, optional query-key norms and rotary positions around dot-product attention."""

    tp_plan = (
        ("", "gather_input"),
        ("w[qkv]", "colwise"),
        ("wo", "rowwise"),
        ("[qk]_norm", "replicated_partial_grad"),
    )

    cp_plan = "local"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        options = require_variant(config.attention, GQAAttentionConfig, "model.attention")
        super().__init__(config, initial, bias=options.bias, key_bias=options.key_bias, output_bias=options.output_bias)
        self.is_cross_attention = pattern.is_cross_attention
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.wq_norm: nn.Module | None = None
        self.wk_norm: nn.Module | None = None
        if options.qk_norm == "all_heads":
            widths = (n * self.head_dim for n in (options.n_heads, options.kv_heads))
            self.wq_norm, self.wk_norm = (ShardedRMSNorm(width, config.norm.eps) for width in widths)
        elif options.qk_norm:
            self.q_norm, self.k_norm = _make_head_norm(config), _make_head_norm(config)
        position = POSITIONS.get(config.position.name)
        is_rotary = position.rotary is not None and not pattern.is_cross_attention
        self.position = position.rotary(config, initial) if is_rotary and position.rotary else None
        core = position.attention if position.attention and not pattern.is_cross_attention else DotProductAttention
        self.core, self.pattern = core(config, initial, pattern), pattern

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of all submodules; those of keys and values process the attended tokens, the others the
        queries'."""
        attended = tokens.with_count(tokens.encoder_tokens) if self.is_cross_attention else tokens
        key_value_modules = self.wk, self.wv, self.k_norm, *filter(None, [self.wk_norm])
        query_modules = (module for module in self.children() if module not in key_value_modules)
        return sum_costs(query_modules, tokens) + sum_costs(key_value_modules, attended)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]. memory: the encoder's output, for cross-attention; None for self-attention."""
        q_BTX = self.wq(x_BTD)
        q_BNTH = self.q_norm(self._split_heads(q_BTX if self.wq_norm is None else self.wq_norm(q_BTX)))
        if memory_BSD is None:
            k_BKSH, v_BKSH = self._project_keys_and_values(x_BTD)
            if self.position is not None:
                q_BNTH, k_BKSH = self.position(q_BNTH, k_BKSH, sequence)
            if cache is not None:
                # Position biases follow distances in the row. After eviction, distances in the cache would differ.
                keep_all = bias is not None and self.pattern.n_initial_kept > 0
                k_BKSH, v_BKSH, sequence = update_cache(
                    cache, k_BKSH, v_BKSH, self.pattern, sequence, keep_all=keep_all
                )
                bias = None if bias is None else slice_last_keys(bias, q_BNTH.shape[2], k_BKSH.shape[2])
        else:
            k_BKSH, v_BKSH = self._project_memory(memory_BSD, cache)
        heads_BNTH = self.core(q_BNTH, k_BKSH, v_BKSH, sequence, bias)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _project_keys_and_values(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        k_BSX = self.wk(x_BSD)
        k_BSX = k_BSX if self.wk_norm is None else self.wk_norm(k_BSX)
        return self.k_norm(self._split_heads(k_BSX)), self._split_heads(self.wv(x_BSD))

    def _project_memory(self, memory_BSD: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        if cache is None or cache.memory is None:
            heads = self._project_keys_and_values(memory_BSD)
            if cache is None:
                return heads
            cache.memory = heads
        return cache.memory


def _make_head_norm(config: ModelConfig) -> nn.Module:
    """Make an RMSNorm over a head's channels, with the options of the model's norm if that is an RMSNorm too."""
    if config.norm.name == "rms_norm":
        return make_norm(config, config.head_width)
    return RMSNorm(config.head_width, config.norm.eps)
