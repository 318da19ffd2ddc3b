"""Memory-compressed attention of decoders (Liu et al. 2018, section 4.2.2): neighbouring keys become one.

As in the authors' code, a query sees the first token of its document and the stretches of `factor` tokens that end
before it. So a key stands where the stretch after it begins, and a query sees those that stand no later than itself.
"""

import torch
from torch import Tensor, nn

from megatfm.config import CompressedAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.attention.core import DotProductAttention
from megatfm.layers.attention.patterns import AttentionPattern, MemoryCompressedPattern, require_full
from megatfm.layers.attention.registry import ATTENTIONS
from megatfm.layers.attention.stretches import CompressedBlocks, CompressedKeyMask, compress_blocks
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.initialisation.mup import with_fixed_inputs
from megatfm.layers.linear import Linear
from megatfm.layers.part import SequenceShard
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import FULL_MASK
from megatfm.ops.initial import InitDistribution

# B batch, T tokens, D model width, N heads, H head width, S stretches, F tokens of one


@ATTENTIONS.register("compressed")
class CompressedAttention(nn.Module):
    """Keys and values of F tokens are convolved to one, within each head: work and memory are 1/F of full attention."""

    tp_plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))
    cp_plan = "sums"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        super().__init__()
        options = require_variant(config.attention, CompressedAttentionConfig, "model.attention")
        require_full(config)
        if pattern.builtin_mask != "causal" or config.position.name not in ("learned", "sinusoidal", "none"):
            raise UsageError(
                "model.attention.name = 'compressed' makes one key of several tokens before the query, which have no "
                f"one position: not in family = {config.family!r} with position.name = {config.position.name!r}: "
                "choose family = 'decoder', and position.name = 'learned', 'sinusoidal' or 'none'"
            )
        d, self.head_dim, self.factor = config.d_model, config.head_width, options.factor
        width = options.n_heads * self.head_dim
        self.wq = Linear(d, width, initial("query", d, width), bias=options.bias)
        self.wk = Linear(d, width, initial("key", d, width), bias=options.bias)
        self.wv = Linear(d, width, initial("value", d, width), bias=options.bias)
        self.wo = Linear(width, d, initial("out", width, d), bias=options.bias)
        shape = self.factor, self.head_dim, self.head_dim, options.n_heads
        fan = self.factor * self.head_dim, self.head_dim
        fixed = with_fixed_inputs(initial)  # a head's channels are as many at every width
        self.of_keys = Convolution(shape, fixed("key", *fan))
        self.of_values = Convolution(shape, fixed("value", *fan))
        self.core = CompressedAttentionCore(config, initial, MemoryCompressedPattern(options.factor))
        self.summed = nn.Identity()  # where sums over some tokens of stretches become those over all

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]."""
        if (
            sequence.full_sequence if isinstance(sequence, SequenceShard) else sequence
        ).prefix_mask is not None:
            raise UsageError(
                "model.attention.name = 'compressed' makes keys of tokens before the query alone, and a prefix is seen "
                "by earlier ones too: use objective.name = 'causal', or model.attention.name = 'gqa'"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        new = k_BNTH.shape[2]
        if cache is not None:
            k_BNTH, v_BNTH = cache.update(k_BNTH, v_BNTH, keeps=self.factor)
        found = compress_blocks(sequence.after_eviction(k_BNTH.shape[2]), self.factor, new)
        k_BNSH, v_BNSH = self.of_keys(k_BNTH, found), self.of_values(v_BNTH, found)
        k_BNSH, v_BNSH = self.summed(torch.cat([k_BNSH, v_BNSH], -1)).chunk(2, -1)
        places_BS = found.places
        if cache is not None:
            k_BNSH, v_BNSH, places_BS = cache.append_compressed(
                k_BNSH, v_BNSH, places_BS.expand(len(x_BTD), -1)
            )
        heads_BNTH = self.core(q_BNTH, k_BNSH, v_BNSH, sequence, places_BS)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def reduced_numel(self, row: SequenceMetadata) -> int:
        """How many numbers of a head are summed where rows are cut."""
        return len(row.positions) * compress_blocks(row, self.factor).places.shape[1] * 2 * self.head_dim


class CompressedAttentionCore(DotProductAttention):
    """Attention to stretches, which are all here wherever the tokens are."""

    cp_plan = "alone"
    eager_when_long = True

    def forward(  # type: ignore[override]  # instead of a bias, where the keys stand
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, sequence: SequenceMetadata, places_BS: Tensor
    ) -> Tensor:
        """[B, N, T, H]."""
        # What a block stores is measured with a plain pattern in place of its own.
        pattern = self.pattern
        seen = (
            CompressedKeyMask(sequence, places_BS, pattern.factor)
            if isinstance(pattern, MemoryCompressedPattern)
            else FULL_MASK
        )
        return self.of_heads(self.dropout.part, q_BNTH, k_BNSH, v_BNSH, sequence, seen=seen)


class Convolution(nn.Module):
    """For each head F matrices [H, H], one for each token of a stretch; the heads last."""

    tp_plan = (("", "last dim"),)

    def __init__(self, shape: tuple[int, ...], initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.initial = {"weight": initial}

    def cost(self, tokens: TokenCounts) -> Cost:
        """Each token meets one of the matrices."""
        return Cost(matmul_macs=self.weight.numel() / len(self.weight) * tokens.n)

    def forward(self, x_BNTH: Tensor, found: CompressedBlocks) -> Tensor:
        """Keys or values of tokens → those of stretches [B, N, S, H], or what the tokens that are here give to them."""
        b, n, _, h = x_BNTH.shape
        index_BSF = found.tokens.expand(b, -1, -1)
        index = index_BSF.flatten(1)[:, None, :, None].expand(-1, n, -1, h)
        x_BNSFH = x_BNTH.gather(2, index).unflatten(2, index_BSF.shape[1:])
        x_BNSFH = x_BNSFH.where(found.here[:, None, ..., None], 0)
        made_BNSH = x_BNSFH.flatten(3) @ self.weight.permute(3, 0, 1, 2).flatten(1, 2)
        return x_BNSFH[..., 0, :].where(found.first[:, None, :, None], made_BNSH)
