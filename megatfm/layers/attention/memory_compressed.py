"""Memory-compressed attention of decoders (Liu et al. 2018, section 4.2.2): one key per block of tokens.

As in the authors' code, a query sees the first token of its document and the blocks of `factor` tokens that end before
it. The position of a compressed key is that of the token after its block, so a query sees keys up to its own position.
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
from megatfm.layers.attention.patterns.pattern import (
    AttentionPattern,
    compute_block_bounds,
    is_one_document,
    shares_document,
)
from megatfm.layers.initialisation import InitDistribution, Initialiser, with_fixed_inputs
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.ops.attention.mask import FULL_MASK, AttentionMask, UnstructuredMask

# B batch, T queries or tokens, D model width, N heads, H head width, S blocks, F tokens of a block

T = TypeVar("T")

BEYOND_ROW = 2**62
"""Position of padding where other rows have more blocks: later than any query."""


@dataclass(frozen=True)
class CompressedBlocks:
    """Blocks of tokens that become one key and value each.

    positions: int64 [B or 1, S], index in the row of the token after the block. is_first_token: bool [B or 1, S], the
    key is the document's first token by itself, at its own index. token_indices: int64 [B or 1, S, F], indices of the
    block's tokens among those of this rank. is_local: bool [B or 1, S, F], whether this rank has the token.
    """

    positions: Tensor
    is_first_token: Tensor
    token_indices: Tensor
    is_local: Tensor


def compress_blocks(sequence: SequenceMetadata, factor: int, n_new: int | None = None) -> CompressedBlocks:
    """Divide documents into blocks of `factor` tokens; a block without a token after it is left out.

    n_new: only blocks whose position is among the last `n_new` tokens; None: all blocks.
    """
    return sequence.cached(("blocks", factor, n_new), lambda: _find_blocks(sequence, factor, n_new))


def _find_blocks(sequence: SequenceMetadata, factor: int, n_new: int | None) -> CompressedBlocks:
    row = sequence.full_sequence
    positions_BT, index_T = row.positions_in_document()[1], row.key_indices
    n_old = 0 if n_new is None or row is not sequence else len(index_T) - n_new
    starts_block_BT = positions_BT[:, n_old:] % factor == 0
    if row.document_ids() is None:
        if n_old or row.cached_length:
            start_BS = starts_block_BT[0].nonzero()[None, :, 0]
        else:  # needs no values, so that the host does not wait
            start_BS = torch.arange(0, positions_BT.shape[1], factor, device=positions_BT.device)[None]
        exists_BS = torch.ones_like(start_BS, dtype=torch.bool)
    else:
        count_B = starts_block_BT.sum(1)
        host_positions_BT = row.on_host().positions_in_document()[1][:, n_old:]
        max_keys = max((host_positions_BT % factor == 0).sum(1).tolist(), default=0)
        start_BS = starts_block_BT.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :max_keys]
        exists_BS = torch.arange(start_BS.shape[1], device=start_BS.device) < count_B[:, None]
    start_BS = start_BS + n_old
    is_first_token_BS = (positions_BT.gather(1, start_BS) == 0) & exists_BS
    inside_F = torch.arange(factor, device=start_BS.device)
    token_indices_BSF = start_BS[..., None] - factor * ~is_first_token_BS[..., None] + inside_F
    is_local_BSF = exists_BS[..., None] & ~(is_first_token_BS[..., None] & (inside_F > 0)) & (token_indices_BSF >= 0)
    token_indices_BSF = token_indices_BSF.clamp(0, len(index_T) - 1)
    if isinstance(sequence, SequenceShard):
        n_local, local_index_T = len(sequence.token_indices), torch.full_like(index_T, -1)
        local_index_T[sequence.token_indices] = torch.arange(n_local, device=index_T.device)
        token_indices_BSF = local_index_T[token_indices_BSF]
        is_local_BSF = is_local_BSF & (token_indices_BSF >= 0)
        token_indices_BSF = token_indices_BSF.clamp(min=0)
    positions_BS = index_T[start_BS].where(exists_BS, BEYOND_ROW)
    return CompressedBlocks(positions_BS, is_first_token_BS, token_indices_BSF, is_local_BSF)


class CompressedKeyMask(UnstructuredMask):
    """An `AttentionMask`: compressed keys of the query's document whose position is no later than the query's."""

    def __init__(self, sequence: SequenceMetadata, positions_BS: Tensor, factor: int) -> None:
        self._sequence, self._positions, self._factor = sequence, positions_BS, factor

    def mask(self) -> Tensor:
        return self.cached("mask", self._mask)

    def _mask(self) -> Tensor:
        documents_q, documents_k = self._get_documents()
        is_earlier = self._positions[:, None, None] <= self._sequence.indices[None, None, :, None]
        return is_earlier & (documents_q[:, None, :, None] == documents_k[:, None, None])

    def block_mask(self, size: int) -> Tensor:
        return self._make_block_table(size, full=False)

    def full_block_mask(self, size: int) -> Tensor:
        return self._make_block_table(size, full=True)

    def _make_block_table(self, size: int, *, full: bool) -> Tensor:
        """Compare the ranges of positions and documents of blocks. Both ascend in a row; padding comes last."""
        q = compute_block_bounds(self._sequence.indices[None], size, -1)
        k = compute_block_bounds(self._positions, size, -2)
        documents_q, documents_k = self._get_documents()
        if full:
            return (k.last <= q.first) & is_one_document(documents_q, documents_k, size)
        return (k.first <= q.last) & shares_document(documents_q, documents_k, size)

    def mask_mod(self, b: Tensor, n: Tensor, q: Tensor, k: Tensor) -> Tensor:
        documents_q, documents_k = self._get_documents()
        rows = b % len(self._positions)
        is_earlier = self._positions[rows, k] <= self._sequence.indices[q]
        return is_earlier & (documents_q[b % len(documents_q), q] == documents_k[b % len(documents_k), k])

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        return self._sequence.cached(("blocks", key, self._factor), make)

    def _get_documents(self) -> tuple[Tensor, Tensor]:
        return self.cached("documents", self._number_documents)

    def _number_documents(self) -> tuple[Tensor, Tensor]:
        """Number the documents of a row from 1, for queries [B or 1, T] and compressed keys [B or 1, S]."""
        sequence = self._sequence
        row = sequence.full_sequence
        positions_BT = row.positions_in_document()[1]
        if row.document_ids() is None:
            return sequence.indices.new_zeros(1, len(sequence.indices)), torch.zeros_like(self._positions[:1])
        starts_BT = (positions_BT == 0).cumsum(1)
        starts_BT = starts_BT.expand(max(len(starts_BT), len(self._positions)), -1)
        exists_BS = self._positions < BEYOND_ROW
        key_documents = starts_BT.gather(1, self._positions.where(exists_BS, 0)).where(exists_BS, BEYOND_ROW)
        return starts_BT[:, sequence.indices], key_documents


@dataclass(frozen=True)
class MemoryCompressedPattern(AttentionPattern):
    """A query sees the first token, and one key for each complete block of `factor` tokens before it."""

    factor: int

    @property
    def has_uneven_work(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        """Return whether a query sees a token."""
        return ((k == 0) & (q >= 0)) | ((k // self.factor + 1) * self.factor <= q)

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        """Count pairs of queries and compressed keys."""
        n_blocks, remainder = divmod(length, self.factor)
        return self.factor * n_blocks * (n_blocks + 1) / 2 + remainder * (n_blocks + 1)


@ATTENTIONS.register("compressed")
class CompressedAttention(HeadProjections):
    """Attention to keys and values convolved over blocks of F tokens, at 1/F of the cost of full attention."""

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
    cp_plan = "all_reduce"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        options = require_variant(config.attention, CompressedAttentionConfig, "model.attention")
        require_full(config)
        if pattern.builtin_mask != "causal" or config.position.name not in ("learned", "sinusoidal", "none"):
            raise UsageError(
                "model.attention.name = 'compressed' makes one key of several earlier tokens, which has no single "
                f"position, so that it does not work in family = {config.family!r} with position.name = "
                f"{config.position.name!r}: choose family = 'decoder', and position.name = 'learned', 'sinusoidal' or "
                "'none'"
            )
        super().__init__(config, initial, bias=options.bias)
        self.factor = options.factor
        shape = self.factor, self.head_dim, self.head_dim, options.n_heads
        fan = self.factor * self.head_dim, self.head_dim
        fixed = with_fixed_inputs(initial)  # muP: a head has equally many channels at every model width
        self.of_keys = Convolution(shape, fixed("key", *fan))
        self.of_values = Convolution(shape, fixed("value", *fan))
        self.core = CompressedAttentionCore(config, initial, MemoryCompressedPattern(options.factor))
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]."""
        if sequence.full_sequence.prefix_mask is not None:
            raise UsageError(
                "model.attention.name = 'compressed' makes keys of earlier tokens only, but all tokens of a document "
                "see its prefix: use objective.name = 'causal', or model.attention.name = 'gqa'"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._split_heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        n_new = k_BNTH.shape[2]
        if cache is not None:
            k_BNTH, v_BNTH = cache.update(k_BNTH, v_BNTH, n_last=self.factor)
        blocks = compress_blocks(sequence.after_eviction(k_BNTH.shape[2]), self.factor, n_new)
        k_BNSH, v_BNSH = self.of_keys(k_BNTH, blocks), self.of_values(v_BNTH, blocks)
        k_BNSH, v_BNSH = self.all_reduce(torch.cat([k_BNSH, v_BNSH], -1)).chunk(2, -1)
        positions_BS = blocks.positions
        if cache is not None:
            k_BNSH, v_BNSH, positions_BS = cache.append_compressed(k_BNSH, v_BNSH, positions_BS.expand(len(x_BTD), -1))
        heads_BNTH = self.core(q_BNTH, k_BNSH, v_BNSH, sequence, positions_BS)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))


class CompressedAttentionCore(DotProductAttention):
    """Attention to compressed keys, all of which are on every rank, whichever tokens the rank has."""

    cp_plan = "local"
    attends_in_chunks = True

    def forward(  # type: ignore[override]  # positions of keys in place of a bias
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, sequence: SequenceMetadata, positions_BS: Tensor
    ) -> Tensor:
        """Return [B, N, T, H]."""
        mask: AttentionMask = FULL_MASK  # the memory profile runs blocks with a plain pattern
        if isinstance(self.pattern, MemoryCompressedPattern):
            mask = CompressedKeyMask(sequence, positions_BS, self.pattern.factor)
        return self.attend_head_shard(self.dropout.shard_index, q_BNTH, k_BNSH, v_BNSH, sequence, mask=mask)


class Convolution(nn.Module):
    """A convolution over the tokens of a block for each head: weights [F, H, H, N]."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, shape: tuple[int, ...], initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.initial = {"weight": initial}

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of one matrix for each token."""
        return Cost(matmul_macs=self.weight.numel() / len(self.weight) * tokens.n)

    def forward(self, x_BNTH: Tensor, blocks: CompressedBlocks) -> Tensor:
        """Convolve keys or values [B, N, T, H] to [B, N, S, H]; with context parallelism, this rank's partial sums."""
        b, n, _, h = x_BNTH.shape
        index_BSF = blocks.token_indices.expand(b, -1, -1)
        index = index_BSF.flatten(1)[:, None, :, None].expand(-1, n, -1, h)
        x_BNSFH = x_BNTH.gather(2, index).unflatten(2, index_BSF.shape[1:])
        x_BNSFH = x_BNSFH.where(blocks.is_local[:, None, ..., None], 0)
        convolved_BNSH = x_BNSFH.flatten(3) @ self.weight.permute(3, 0, 1, 2).flatten(1, 2)
        return x_BNSFH[..., 0, :].where(blocks.is_first_token[:, None, :, None], convolved_BNSH)
