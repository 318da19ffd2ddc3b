"""Longformer's attention (Beltagy et al. 2020, section 3.1): tokens that see all have projections of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatfm.config import LongformerAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import Longformer
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.mask import DenseMask
from megatfm.ops.attention.reference import attention_reference
from megatfm.ops.transfer import moved

# B batch, T tokens, D model width, N heads, H head width, G places of tokens that see all


@ATTENTIONS.register("longformer")
class LongformerAttention(nn.Module):
    """All keys are projected twice: once for queries that see a window, once for those that see all."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("w[qkv]_global", "colwise"), ("wo", "rowwise"))
    cp_plan = "local"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__()
        options = require_variant(config.attention, LongformerAttentionConfig, "model.attention")
        if not isinstance(pattern, Longformer) or not pattern.tokens:
            raise UsageError(
                "model.attention.name = 'longformer' needs model.attention.pattern.name = 'longformer' with tokens "
                f"that see all, not {config.attention.pattern.name!r} without: set both, or neither"
            )
        if (
            config.position.name not in ("learned", "sinusoidal", "none")
            or options.n_kv_heads
            or options.qk_norm
            or options.sinks
        ):
            raise UsageError(
                "model.attention.name = 'longformer' has positions in the embeddings alone, and a key head for each "
                f"query head: leave out n_kv_heads, qk_norm and sinks, and set position.name = 'learned', not "
                f"{config.position.name!r}"
            )
        d, self.head_dim = config.d_model, config.head_width
        width = options.n_heads * self.head_dim
        for part in ("", "_global"):
            initial_weights = {
                "q": initial("query", d, width),
                "k": initial("key", d, width),
                "v": initial("value", d, width),
            }
            for name, values in initial_weights.items():
                self.add_module(f"w{name}{part}", Linear(d, width, values, bias=options.bias))
        self.wo = Linear(width, d, initial("out", width, d), bias=options.bias)
        self.core, self.wide = (
            LocalAttention(config, initial, pattern),
            GlobalAttention(config, initial, pattern),
        )
        self.tokens = pattern.tokens

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]."""
        heads_BNTH = self.core(*(self._heads(name, x_BTD) for name in ("wq", "wk", "wv")), sequence)
        key, device = ("tokens that see all", tuple(self.tokens)), x_BTD.device
        places_BG, found_BG = sequence.cached(key, lambda: self._places(sequence, device))
        at_BGD = x_BTD.gather(1, places_BG[..., None].expand(-1, -1, x_BTD.shape[2]))
        q_BNGH = self._heads("wq_global", at_BGD)
        k_BNTH, v_BNTH = self._heads("wk_global", x_BTD), self._heads("wv_global", x_BTD)
        heads_BNTH = self.wide(heads_BNTH, q_BNGH, k_BNTH, v_BNTH, places_BG, found_BG, sequence)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _places(self, sequence: SequenceMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the places of global tokens in their rows [B, G], and a mask, since rows have unequally many. The host
        computes them, since it has to know their number."""
        places_BT = sequence.on_host().positions_in_document()[0].expand(len(sequence.positions), -1)
        is_wide_BT = torch.isin(places_BT, torch.tensor(self.tokens))
        count_B = is_wide_BT.sum(1)
        order_BG = is_wide_BT.to(torch.int8).argsort(dim=1, descending=True, stable=True)[
            :, : int(count_B.max())
        ]
        found_BG = torch.arange(order_BG.shape[1]) < count_B[:, None]
        return moved(order_BG, device), moved(found_BG, device)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        projected: Tensor = getattr(self, name)(x)
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LocalAttention(DotProductAttention):
    """Attention to a window and to tokens that see all. Their attention is computed separately, and written to their
    places."""

    def wide(self, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]) -> Tensor:
        """None."""
        return torch.empty(0, dtype=torch.int64)


class GlobalAttention(DotProductAttention):
    """Attention of tokens that see all of their document."""

    cp_plan = "global_queries"

    def cost(self, tokens: TokenCounts) -> Cost:
        """Nothing more: the pattern's pairs, which the other core counts, have these."""
        return Cost()

    def forward(  # type: ignore[override]  # of some queries, and what others gave
        self,
        heads_BNTH: Tensor,
        q_BNGH: Tensor,
        k_BNTH: Tensor,
        v_BNTH: Tensor,
        places_BG: Tensor,
        found_BG: Tensor,
        sequence: SequenceMetadata,
    ) -> Tensor:
        """[B, N, T, H]: `heads` with theirs in their places."""
        seen_BGT = found_BG[..., None].expand(-1, -1, k_BNTH.shape[2])
        if (numbers := sequence.document_ids()) is not None:
            seen_BGT = seen_BGT & (numbers[0].gather(1, places_BG)[..., None] == numbers[1][:, None])
        rng_keys_BNT = self.dropout.head_rng_keys(sequence, q_BNGH.shape[1])
        if rng_keys_BNT is not None:
            rng_keys_BNT = rng_keys_BNT.gather(2, places_BG[:, None].expand(-1, q_BNGH.shape[1], -1))
        mask = DenseMask(None, seen_BGT[:, None])
        wide_BNGH = attention_reference(q_BNGH, k_BNTH, v_BNTH, mask, None, self.variant, rng_keys_BNT)
        # A row with fewer such tokens than another keeps the value at its first place.
        index = places_BG[:, None, :, None].expand(-1, heads_BNTH.shape[1], -1, heads_BNTH.shape[3])
        wide_BNGH = wide_BNGH.where(found_BG[:, None, :, None], heads_BNTH.gather(2, index))
        return heads_BNTH.scatter(2, index, wide_BNGH.to(heads_BNTH.dtype))
