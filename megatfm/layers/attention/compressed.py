"""Memory-compressed attention of decoders (Liu et al. 2018, section 4.2.2): neighbouring keys become one.

As in the authors' code, a query sees the first token of its document and the stretches of `factor` tokens that end
before it. So a key stands where the stretch after it begins, and a query sees those that stand no later than itself.
"""

import torch
from torch import Tensor, nn

from megatfm.config import CompressedAttentionConfig, ModelConfig, expect
from megatfm.cost import Cost, Tokens
from megatfm.errors import UsageError
from megatfm.layers.attention.cache import LayerCache
from megatfm.layers.attention.core import Core
from megatfm.layers.attention.patterns import Compressed, Pattern, require_full
from megatfm.layers.attention.registry import ATTENTIONS
from megatfm.layers.attention.stretches import SeenStretches, Stretches, stretches
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.initialisation.mup import with_fixed_inputs
from megatfm.layers.linear import Linear
from megatfm.layers.part import Part
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import ALL
from megatfm.ops.initial import Initial

# B batch, T tokens, D model width, N heads, H head width, S stretches, F tokens of one


@ATTENTIONS.register("compressed")
class CompressedAttention(nn.Module):
    """Keys and values of F tokens are convolved to one, within each head: work and memory are 1/F of full attention."""

    plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))
    context = "sums"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: Pattern) -> None:
        super().__init__()
        options = expect(config.attention, CompressedAttentionConfig, "model.attention")
        require_full(config)
        if pattern.plain != "causal" or config.position.name not in ("learned", "sinusoidal", "none"):
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
        self.core = StretchCore(config, initial, Compressed(options.factor))
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
        if (sequence.row if isinstance(sequence, Part) else sequence).opened is not None:
            raise UsageError(
                "model.attention.name = 'compressed' makes keys of tokens before the query alone, and a prefix is seen "
                "by earlier ones too: use objective.name = 'causal', or model.attention.name = 'heads'"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        new = k_BNTH.shape[2]
        if cache is not None:
            k_BNTH, v_BNTH = cache.extend(k_BNTH, v_BNTH, keeps=self.factor)
        found = stretches(sequence.with_keys(k_BNTH.shape[2]), self.factor, new)
        k_BNSH, v_BNSH = self.of_keys(k_BNTH, found), self.of_values(v_BNTH, found)
        k_BNSH, v_BNSH = self.summed(torch.cat([k_BNSH, v_BNSH], -1)).chunk(2, -1)
        places_BS = found.places
        if cache is not None:
            k_BNSH, v_BNSH, places_BS = cache.append(k_BNSH, v_BNSH, places_BS.expand(len(x_BTD), -1))
        heads_BNTH = self.core(q_BNTH, k_BNSH, v_BNSH, sequence, places_BS)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def sums_of(self, row: SequenceMetadata) -> int:
        """How many numbers of a head are summed where rows are cut."""
        return len(row.positions) * stretches(row, self.factor).places.shape[1] * 2 * self.head_dim


class StretchCore(Core):
    """Attention to stretches, which are all here wherever the tokens are."""

    context = "alone"
    eager_when_long = True

    def forward(  # type: ignore[override]  # instead of a bias, where the keys stand
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, sequence: SequenceMetadata, places_BS: Tensor
    ) -> Tensor:
        """[B, N, T, H]."""
        # What a block stores is measured with a plain pattern in place of its own.
        pattern = self.pattern
        seen = SeenStretches(sequence, places_BS, pattern.factor) if isinstance(pattern, Compressed) else ALL
        return self.of_heads(self.dropout.part, q_BNTH, k_BNSH, v_BNSH, sequence, seen=seen)


class Convolution(nn.Module):
    """For each head F matrices [H, H], one for each token of a stretch; the heads last."""

    plan = (("", "last dim"),)

    def __init__(self, shape: tuple[int, ...], initial: Initial) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.initial = {"weight": initial}

    def cost(self, tokens: Tokens) -> Cost:
        """Each token meets one of the matrices."""
        return Cost(products=self.weight.numel() / len(self.weight) * tokens.n)

    def forward(self, x_BNTH: Tensor, found: Stretches) -> Tensor:
        """Keys or values of tokens → those of stretches [B, N, S, H], or what the tokens that are here give to them."""
        b, n, _, h = x_BNTH.shape
        index_BSF = found.tokens.expand(b, -1, -1)
        index = index_BSF.flatten(1)[:, None, :, None].expand(-1, n, -1, h)
        x_BNSFH = x_BNTH.gather(2, index).unflatten(2, index_BSF.shape[1:])
        x_BNSFH = x_BNSFH.where(found.here[:, None, ..., None], 0)
        made_BNSH = x_BNSFH.flatten(3) @ self.weight.permute(3, 0, 1, 2).flatten(1, 2)
        return x_BNSFH[..., 0, :].where(found.first[:, None, :, None], made_BNSH)
