"""Memory-compressed attention of decoders (Liu et al. 2018, section 4.2.2): blocks of neighbouring keys become one.

As in the authors' code, a query sees the first token of its document and the blocks of `factor` tokens that end before
it. So a key stands where the block after it begins, and a query sees those that stand no later than itself.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatfm.config import CompressedAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention, HeadProjections
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.initialisation import InitDistribution, Initialiser, with_fixed_inputs
from megatfm.layers.sequence import SequenceMetadata, SequenceShard
from megatfm.ops.attention.mask import FULL_MASK, BuiltinMask

# B batch, T queries or tokens, D model width, N heads, H head width, S blocks, F tokens of one

T = TypeVar("T")

NO_POSITION = 2**62
"""The place of a stretch that a row does not have, where others have more: later than all queries."""


@dataclass(frozen=True)
class CompressedBlocks:
    """places int64 [B or 1, S]: where in its row the token stands that comes after a stretch; `first`: or that is the
    document's first, and alone.

    tokens int64 [B or 1, S, F]: numbers of its tokens among those that are here; is_here: booleans, whether they are.
    """

    places: Tensor
    first: Tensor
    tokens: Tensor
    is_here: Tensor


def compress_blocks(sequence: SequenceMetadata, factor: int, new: int | None = None) -> CompressedBlocks:
    """Stretches of documents, F tokens each from the first one on. new: only those that stand at one of so many last
    tokens. A stretch that nothing comes after is left out."""
    row = sequence.full_sequence if isinstance(sequence, SequenceShard) else sequence
    return sequence.cached(("stretches", factor, new), lambda: _stretches(sequence, row, factor, new))


def _stretches(
    sequence: SequenceMetadata, row: SequenceMetadata, factor: int, new: int | None
) -> CompressedBlocks:
    places_BT, index_T = row.positions_in_document()[1], row.key_indices
    old = 0 if new is None or row is not sequence else len(index_T) - new
    stands_BT = places_BT[:, old:] % factor == 0
    if row.document_ids() is None:
        at_BS = stands_BT[0].nonzero()[None, :, 0] if old or row.cached_length else _every(factor, places_BT)
        has_BS = torch.ones_like(at_BS, dtype=torch.bool)
    else:
        count_B = stands_BT.sum(1)
        known_BT = row.on_host().positions_in_document()[1][:, old:]
        max_keys = int((known_BT % factor == 0).sum(1).max())
        at_BS = stands_BT.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :max_keys]
        has_BS = torch.arange(at_BS.shape[1], device=at_BS.device) < count_B[:, None]
    at_BS = at_BS + old
    first_BS = (places_BT.gather(1, at_BS) == 0) & has_BS
    inside_F = torch.arange(factor, device=at_BS.device)
    tokens_BSF = at_BS[..., None] - factor * ~first_BS[..., None] + inside_F
    here_BSF = has_BS[..., None] & ~(first_BS[..., None] & (inside_F > 0)) & (tokens_BSF >= 0)
    tokens_BSF = tokens_BSF.clamp(0, len(index_T) - 1)
    if isinstance(sequence, SequenceShard):
        held_T = torch.full_like(index_T, -1)
        held_T[sequence.token_indices] = torch.arange(len(sequence.token_indices), device=index_T.device)
        tokens_BSF = held_T[tokens_BSF]
        here_BSF, tokens_BSF = here_BSF & (tokens_BSF >= 0), tokens_BSF.clamp(min=0)
    places_BS = index_T[at_BS].where(has_BS, NO_POSITION)
    return CompressedBlocks(places_BS, first_BS, tokens_BSF, here_BSF)


def _every(factor: int, places_1T: Tensor) -> Tensor:
    """[1, S]: known without a look at the tokens."""
    return torch.arange(0, places_1T.shape[1], factor, device=places_1T.device)[None]


class CompressedKeyMask:
    """Stretches that stand no later than the query, in its document: a `AttentionMask` of `ops.attention`."""

    builtin_mask: BuiltinMask | None = None
    grain: int | None = None
    window: tuple[int, int] | None = None

    def __init__(self, sequence: SequenceMetadata, places_BS: Tensor, factor: int) -> None:
        self._sequence, self._places, self._factor = sequence, places_BS, factor

    def mask(self) -> Tensor:
        return self.cached("mask", self._mask)

    def _mask(self) -> Tensor:
        documents_q, documents_k = self._documents()
        is_earlier = self._places[:, None, None] <= self._sequence.indices[None, None, :, None]
        return is_earlier & (documents_q[:, None, :, None] == documents_k[:, None, None])

    def block_mask(self, size: int) -> Tensor:
        return self._table(size, full=False)

    def full_block_mask(self, size: int) -> Tensor:
        return self._table(size, full=True)

    def _table(self, size: int, *, full: bool) -> Tensor:
        """Stretches stand in order, and documents too: what a row does not have is last, and in none."""
        (q_first, q_last), (k_first, k_last) = (
            _ends(x, size, dim) for x, dim in ((self._sequence.indices[None], -1), (self._places, -2))
        )
        documents_q, documents_k = self._documents()
        (first_q, last_q), (first_k, last_k) = _ends(documents_q, size, -1), _ends(documents_k, size, -2)
        if full:
            is_same_block = (first_q == last_q) & (first_k == last_k) & (first_q == first_k)
            return (k_last <= q_first) & is_same_block
        return (k_first <= q_last) & (first_k <= last_q) & (last_k >= first_q)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        documents_q, documents_k = self._documents()
        rows = b % len(self._places)
        is_earlier = self._places[rows, k] <= self._sequence.indices[q]
        return is_earlier & (documents_q[b % len(documents_q), q] == documents_k[b % len(documents_k), k])

    def translation_invariant_blocks(self, size: int) -> None:
        return None

    def starts(self) -> Tensor:
        """Not needed, since there is no window."""
        raise NotImplementedError

    def bands(self, *, fused: bool) -> None:
        return None

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached(("stretches", key, self._factor), make)

    def _documents(self) -> tuple[Tensor, Tensor]:
        return self.cached("documents", self._numbered)

    def _numbered(self) -> tuple[Tensor, Tensor]:
        """For queries [B or 1, T] and stretches [B or 1, S]: the number of documents that begin in the row before their
        own ends."""
        sequence = self._sequence
        row = sequence.full_sequence if isinstance(sequence, SequenceShard) else sequence
        places_BT = row.positions_in_document()[1]
        if row.document_ids() is None:
            return sequence.indices.new_zeros(1, len(sequence.indices)), torch.zeros_like(self._places[:1])
        starts_BT = (places_BT == 0).cumsum(1)
        starts_BT = starts_BT.expand(max(len(starts_BT), len(self._places)), -1)
        has_BS = self._places < NO_POSITION
        key_documents = starts_BT.gather(1, self._places.where(has_BS, 0)).where(has_BS, NO_POSITION)
        return starts_BT[:, sequence.indices], key_documents


def _ends(values: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each block [B or 1, 1, ·, 1] or [B or 1, 1, 1, ·]."""
    missing = -values.shape[1] % size
    blocks = torch.cat([values, values[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))
    return blocks.amin(-1)[:, None].unsqueeze(dim), blocks.amax(-1)[:, None].unsqueeze(dim)


@dataclass(frozen=True)
class MemoryCompressedPattern(AttentionPattern):
    """A query sees the first token and whole stretches of `factor` tokens before it, each of which is one key."""

    factor: int

    @property
    def has_uneven_work(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        """Whether a query sees a token."""
        return ((k == 0) & (q >= 0)) | ((k // self.factor + 1) * self.factor <= q)

    def pairs(self, length: int, n_heads: int = 1) -> float:
        """Pairs of queries and compressed keys."""
        stretches, remainder = divmod(length, self.factor)
        return self.factor * stretches * (stretches + 1) / 2 + remainder * (stretches + 1)


@ATTENTIONS.register("compressed")
class CompressedAttention(HeadProjections):
    """Keys and values of F tokens are convolved to one, within each head: work and memory are 1/F of full attention."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
    cp_plan = "all_reduce"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        options = require_variant(config.attention, CompressedAttentionConfig, "model.attention")
        require_full(config)
        if pattern.builtin_mask != "causal" or config.position.name not in ("learned", "sinusoidal", "none"):
            raise UsageError(
                "model.attention.name = 'compressed' makes one key of several tokens before the query, which have no "
                f"one position: not in family = {config.family!r} with position.name = {config.position.name!r}: "
                "choose family = 'decoder', and position.name = 'learned', 'sinusoidal' or 'none'"
            )
        super().__init__(config, initial, bias=options.bias)
        self.factor = options.factor
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
        blocks = compress_blocks(sequence.after_eviction(k_BNTH.shape[2]), self.factor, new)
        k_BNSH, v_BNSH = self.of_keys(k_BNTH, blocks), self.of_values(v_BNTH, blocks)
        k_BNSH, v_BNSH = self.summed(torch.cat([k_BNSH, v_BNSH], -1)).chunk(2, -1)
        places_BS = blocks.places
        if cache is not None:
            k_BNSH, v_BNSH, places_BS = cache.append_compressed(
                k_BNSH, v_BNSH, places_BS.expand(len(x_BTD), -1)
            )
        heads_BNTH = self.core(q_BNTH, k_BNSH, v_BNSH, sequence, places_BS)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def reduced_numel(self, row: SequenceMetadata) -> int:
        """Numbers of a head that are summed where rows are cut."""
        return len(row.positions) * compress_blocks(row, self.factor).places.shape[1] * 2 * self.head_dim


class CompressedAttentionCore(DotProductAttention):
    """Attention to stretches, all of which are on this rank even if the tokens are not."""

    cp_plan = "local"
    attends_in_chunks = True

    def forward(  # type: ignore[override]  # instead of a bias, where the keys stand
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, sequence: SequenceMetadata, places_BS: Tensor
    ) -> Tensor:
        """[B, N, T, H]."""
        # Activations of a block are measured with a plain pattern in place of its own.
        pattern = self.pattern
        mask = (
            CompressedKeyMask(sequence, places_BS, pattern.factor)
            if isinstance(pattern, MemoryCompressedPattern)
            else FULL_MASK
        )
        return self.of_heads(self.dropout.part, q_BNTH, k_BNSH, v_BNSH, sequence, mask=mask)


class Convolution(nn.Module):
    """For each head F matrices [H, H], one for each token of a stretch; the heads last."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, shape: tuple[int, ...], initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.initial = {"weight": initial}

    def cost(self, tokens: TokenCounts) -> Cost:
        """Each token meets one of the matrices."""
        return Cost(matmul_macs=self.weight.numel() / len(self.weight) * tokens.n)

    def forward(self, x_BNTH: Tensor, blocks: CompressedBlocks) -> Tensor:
        """Keys or values of tokens → those of stretches [B, N, S, H], or what the tokens that are here give to them."""
        b, n, _, h = x_BNTH.shape
        index_BSF = blocks.tokens.expand(b, -1, -1)
        index = index_BSF.flatten(1)[:, None, :, None].expand(-1, n, -1, h)
        x_BNSFH = x_BNTH.gather(2, index).unflatten(2, index_BSF.shape[1:])
        x_BNSFH = x_BNSFH.where(blocks.is_here[:, None, ..., None], 0)
        made_BNSH = x_BNSFH.flatten(3) @ self.weight.permute(3, 0, 1, 2).flatten(1, 2)
        return x_BNSFH[..., 0, :].where(blocks.first[:, None, :, None], made_BNSH)
