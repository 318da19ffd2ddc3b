"""Longformer's attention (Beltagy et al. 2020, section 3.1): global tokens have separate projections."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatfm.config import LongformerAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention, HeadProjections
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import Longformer
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.mask import DenseMask
from megatfm.ops.attention.reference import attention_reference
from megatfm.ops.transfer import move_to_device

# B batch, T tokens, D model width, N heads, H head width, G global tokens


@ATTENTIONS.register("longformer")
class LongformerAttention(HeadProjections):
    """Windowed attention for all tokens, and full attention with separate projections for global tokens."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("w[qkv]_global", "colwise"), ("wo", "rowwise"))
    cp_plan = "local"
    lora_without_dropout = ("wq_global",)  # it reads the global tokens

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        options = require_variant(config.attention, LongformerAttentionConfig, "model.attention")
        if not isinstance(pattern, Longformer) or not pattern.tokens:
            raise UsageError(
                "model.attention.name = 'longformer' needs model.attention.pattern.name = 'longformer' with "
                f"global_tokens, not {config.attention.pattern.name!r} without them: set both, or neither"
            )
        if (
            config.position.name not in ("learned", "sinusoidal", "none")
            or options.n_kv_heads
            or options.qk_norm
            or options.sinks
            or (options.key_bias, options.output_bias) != (None, None)
        ):
            raise UsageError(
                "model.attention.name = 'longformer' supports positions in the embeddings only, and one key head for "
                "each query head: leave out n_kv_heads, qk_norm, sinks, key_bias and output_bias, and set "
                f"position.name = 'learned', not {config.position.name!r}"
            )
        super().__init__(config, initial, bias=options.bias)
        d, width = config.d_model, options.n_heads * self.head_dim
        self.wq_global = Linear(d, width, initial("query", d, width), bias=options.bias)
        self.wk_global = Linear(d, width, initial("key", d, width), bias=options.bias)
        self.wv_global = Linear(d, width, initial("value", d, width), bias=options.bias)
        # `wo` is the last one: norms of gradients are summed in the order of parameters.
        self.register_module("wo", self._modules.pop("wo"))
        self.core, self.tokens = LocalAttention(config, initial, pattern), pattern.tokens
        self.global_core = GlobalAttention(config, initial, pattern)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]."""
        heads_BNTH = self.core(*(self._split_heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv)), sequence)
        key, device = ("global tokens", tuple(self.tokens)), x_BTD.device
        indices_BG, exists_BG = sequence.cached(key, lambda: self._find_global_tokens(sequence, device))
        x_BGD = x_BTD.gather(1, indices_BG[..., None].expand(-1, -1, x_BTD.shape[2]))
        q_BNGH = self._split_heads(self.wq_global(x_BGD))
        k_BNTH, v_BNTH = (self._split_heads(w(x_BTD)) for w in (self.wk_global, self.wv_global))
        heads_BNTH = self.global_core(heads_BNTH, q_BNGH, k_BNTH, v_BNTH, indices_BG, exists_BG, sequence)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _find_global_tokens(self, sequence: SequenceMetadata, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token indices of global tokens [B, G], and a mask [B, G] of those that exist.

        Rows may have different numbers of them. The host computes both, because shapes depend on G.
        """
        positions_BT = sequence.on_host().positions_in_document()[0].expand(len(sequence.positions), -1)
        is_global_BT = torch.isin(positions_BT, torch.tensor(self.tokens))
        count_B = is_global_BT.sum(1)
        order_BG = is_global_BT.to(torch.int8).argsort(dim=1, descending=True, stable=True)[
            :, : max(count_B.tolist(), default=0)
        ]
        exists_BG = torch.arange(order_BG.shape[1]) < count_B[:, None]
        return move_to_device(order_BG, device), move_to_device(exists_BG, device)


class LocalAttention(DotProductAttention):
    """Attention to a window and to global tokens. GlobalAttention overwrites the outputs of global queries."""

    def find_global_queries(self, row: SequenceMetadata, indices_by_rank: Sequence[Tensor]) -> Tensor:
        """Return no indices: GlobalAttention computes global queries."""
        return torch.empty(0, dtype=torch.int64)


class GlobalAttention(DotProductAttention):
    """Attention of the global tokens to all of their document."""

    cp_plan = "global_queries"

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return 0: LocalAttention counts all pairs of the pattern, global ones included."""
        return Cost()

    def forward(  # type: ignore[override]  # outputs of local attention, and a subset of queries
        self,
        heads_BNTH: Tensor,
        q_BNGH: Tensor,
        k_BNTH: Tensor,
        v_BNTH: Tensor,
        indices_BG: Tensor,
        exists_BG: Tensor,
        sequence: SequenceMetadata,
    ) -> Tensor:
        """Return heads_BNTH with the outputs of global queries replaced, [B, N, T, H]."""
        mask_BGT = exists_BG[..., None].expand(-1, -1, k_BNTH.shape[2])
        if (documents := sequence.document_ids()) is not None:
            mask_BGT = mask_BGT & (documents[0].gather(1, indices_BG)[..., None] == documents[1][:, None])
        rng_keys_BNT = self.dropout.make_head_rng_keys(sequence, q_BNGH.shape[1])
        if rng_keys_BNT is not None:
            rng_keys_BNT = rng_keys_BNT.gather(2, indices_BG[:, None].expand(-1, q_BNGH.shape[1], -1))
        mask = DenseMask(None, mask_BGT[:, None])
        outputs_BNGH = attention_reference(q_BNGH, k_BNTH, v_BNTH, mask, None, self.options, rng_keys_BNT)
        # Padding, in rows with fewer global tokens than others, keeps the existing output.
        index = indices_BG[:, None, :, None].expand(-1, heads_BNTH.shape[1], -1, heads_BNTH.shape[3])
        outputs_BNGH = outputs_BNGH.where(exists_BG[:, None, :, None], heads_BNTH.gather(2, index))
        return heads_BNTH.scatter(2, index, outputs_BNGH.to(heads_BNTH.dtype))
