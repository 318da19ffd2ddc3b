"""Disentangled attention as from DeBERTa v2 on (He et al. 2021, appendix A.11): positions share the projections."""

from functools import partial

from torch import Tensor, nn

from megatfm.config import DebertaV2PositionConfig, ModelConfig
from megatfm.cost import Cost, TokenCounts, total_cost
from megatfm.errors import UsageError
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.attention.disentangled import DisentangledCore
from megatfm.layers.attention.patterns import AttentionPattern, require_full
from megatfm.layers.attention.registry import ATTENTIONS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.position.disentangled_buckets import log_bucket_position
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D model width, N heads, H head width, R buckets of relative positions


@ATTENTIONS.register("deberta_v2")
class DisentangledSharedAttention(nn.Module):
    """The table of relative positions goes through the content's projections of queries and keys."""

    tp_plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))

    cp_plan = "alone"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__()
        require_full(config)
        if not isinstance(config.position, DebertaV2PositionConfig) or pattern.builtin_mask != "all":
            raise UsageError(
                "model.attention.name = 'deberta_v2' needs model.position.name = "
                "'disentangled_buckets' and family = 'encoder'"
            )
        d, width = config.d_model, config.attention.n_heads * config.head_width
        self.head_dim, n, farthest = config.head_width, config.position.buckets, config.position.max_distance
        self.wq = Linear(d, width, initial("query", d, width), bias=True)
        self.wk = Linear(d, width, initial("key", d, width), bias=True)
        self.wv = Linear(d, width, initial("value", d, width), bias=True)
        self.wo = Linear(width, d, initial("out", width, d), bias=True)
        self.core = DisentangledCore(config, pattern, partial(_bucketed, n=n, farthest=farthest), 2 * n)

    def cost(self, tokens: TokenCounts) -> Cost:
        """The table of positions goes through the projections of queries and keys, too."""
        of_table = total_cost((self.wq, self.wk), tokens.with_count(self.core.n_rows))
        of_tokens = total_cost((self.wq, self.wk, self.wv, self.wo), tokens)
        return of_tokens + of_table + self.core.cost(tokens)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]; `bias` is the table [R, D] of relative positions."""
        q, k, v = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        q_position, k_position = (self._heads(w(bias)) for w in (self.wq, self.wk))
        heads_BNTH = self.core(q, k, v, sequence, (q_position, k_position))
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


def _bucketed(distances: Tensor, n: int, farthest: int) -> Tensor:
    """Return the row of the table of positions for each distance."""
    return (log_bucket_position(distances, n, farthest) + n).clamp(0, 2 * n - 1)
