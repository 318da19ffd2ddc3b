"""DeBERTa's disentangled attention (He et al. 2021, equations 2 to 4): content and relative position, apart."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatfm.config import DebertaPositionConfig, ModelConfig
from megatfm.cost import Cost, TokenCounts, total_cost
from megatfm.errors import UsageError
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.attention.patterns import AttentionPattern, require_full
from megatfm.layers.attention.registry import ATTENTIONS
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import probabilities, unless_blind
from megatfm.ops.attention.rows import attend_in_chunks

# B batch, T queries, S keys, D model width, N heads, H head width, R relative positions


@ATTENTIONS.register("deberta")
class DisentangledAttention(nn.Module):
    """Scores are content·content + content·position + position·content, scaled by 1/√(3H).

    Position-to-content reads the vector of query − key, as the released code does; equation 4 has key − query.
    """

    tp_plan = (("", "enter"), ("w[qkv]", "column"), ("w[qk]_position", "column"), ("wo", "row"))

    cp_plan = "alone"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__()
        require_full(config)
        if not isinstance(config.position, DebertaPositionConfig) or pattern.builtin_mask != "all":
            raise UsageError(
                "model.attention.name = 'deberta' needs model.position.name = 'deberta' and "
                "family = 'encoder'"
            )
        d, width = config.d_model, config.attention.n_heads * config.head_width
        self.head_dim, farthest = config.head_width, config.position.max_distance
        self.wq = Linear(d, width, initial("query", d, width), bias=True)
        self.wk = Linear(d, width, initial("key", d, width))
        self.wv = Linear(d, width, initial("value", d, width), bias=True)
        self.wo = Linear(width, d, initial("out", width, d), bias=True)
        self.wq_position = Linear(d, width, initial("query", d, width), bias=True)
        self.wk_position = Linear(d, width, initial("key", d, width))
        self.core = DisentangledCore(config, pattern, partial(_clamped, farthest=farthest), 2 * farthest)

    def cost(self, tokens: TokenCounts) -> Cost:
        """The table of positions goes through projections of its own."""
        of_table = total_cost((self.wq_position, self.wk_position), tokens.with_count(self.core.n_rows))
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
        table_RD = bias
        q, k, v = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        q_position, k_position = (self._heads(w(table_RD)) for w in (self.wq_position, self.wk_position))
        heads_BNTH = self.core(q, k, v, sequence, (q_position, k_position))
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)


class DisentangledCore(nn.Module):
    """The scores and what follows from them. rows: of the table, which has `n_rows`, for distances query − key."""

    tp_plan = (("dropout", "keys of own part"),)

    cp_plan = "core"

    def __init__(
        self, config: ModelConfig, pattern: AttentionPattern, rows: Callable[[Tensor], Tensor], n_rows: int
    ) -> None:
        super().__init__()
        self.pattern, self.rows, self.scale = pattern, rows, (3 * config.head_width) ** -0.5
        self.n_heads, self.n_rows = config.attention.n_heads, n_rows
        self.channels = 2 * self.n_heads * config.head_width
        self.dropout = Dropout(config.attention.dropout, "attention")

    def cost(self, tokens: TokenCounts) -> Cost:
        """Of the scores and of the sums of values, and of queries and of keys with each of the table's rows."""
        by_row = self.channels * self.n_rows * tokens.n
        return self.pattern.cost(tokens, self.channels, self.n_heads) + Cost(
            attention_macs=by_row, visible_attention_macs=by_row
        )

    def forward(
        self,
        q_BNTH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        sequence: SequenceMetadata,
        positions: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[B, N, T, H]. positions: queries and keys [N, R, H] of the table."""
        q_NRH, k_NRH = positions
        q_BNTH = q_BNTH * self.scale
        of_keys_BNSR = (k_BNSH * self.scale) @ q_NRH.transpose(-1, -2)
        rng_keys_BNT = self.dropout.head_rng_keys(sequence, q_BNTH.shape[1])

        def attend(rows: slice) -> Tensor:
            distances_TS, some_BNTH = -sequence.relative_positions(rows), q_BNTH[:, :, rows]  # query − key
            of_keys, of_queries = (
                self.rows(d).expand(*q_BNTH.shape[:2], -1, -1) for d in (distances_TS, distances_TS.T)
            )
            content_to_position = (some_BNTH @ k_NRH.transpose(-1, -2)).gather(-1, of_keys)
            position_to_content = of_keys_BNSR.gather(-1, of_queries)
            scores_BNTS = some_BNTH @ k_BNSH.transpose(-1, -2) + content_to_position
            scores_BNTS = scores_BNTS + position_to_content.transpose(-1, -2)
            drawn = None if rng_keys_BNT is None else rng_keys_BNT[:, :, rows]
            mask_B1TS = sequence.mask(self.pattern, rows=rows)
            shares_BNTS = probabilities(scores_BNTS, mask_B1TS, self.dropout.rate, drawn)
            return unless_blind(shares_BNTS @ v_BNSH, mask_B1TS)

        return attend_in_chunks(attend, q_BNTH, k_BNSH.shape[2], "disentangled")


def _clamped(distances: Tensor, farthest: int) -> Tensor:
    """Return the row of the table of positions for each distance."""
    return (distances + farthest).clamp(0, 2 * farthest - 1)
