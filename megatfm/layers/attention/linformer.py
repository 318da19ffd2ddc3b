"""Linformer's attention (Wang et al. 2020): projects a document's keys and values to a fixed number.

The cost of attention is linear in the document's length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatfm.config import LinformerAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, HeadProjections, log_kernel
from megatfm.layers.attention.gqa import GroupedQueryAttention
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.ops.attention.kernels import AttentionRequest, choose_kernel
from megatfm.ops.attention.mask import FULL_MASK
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.transfer import to_host

# B batch, T tokens, D model width, N heads, H head width, P positions in a document, R projected length, M documents

MAX_QUERIES_PER_CHUNK = 4096
"""Queries computed at once on a CPU. The scores of more would not fit its caches. Written-out matrix products are
faster there than the fused kernel (docs/LOG.md, 2026-11-23)."""
MAX_SCORE_BYTES = 24 * 2**20
"""Largest score tensor. The allocator maps blocks of 32 MB anew each time (`megatfm.train.profiling`)."""

KVProjections = tuple[Tensor, Tensor]
"""The projections of keys and of values along the sequence, each [P, R] or [P, R, N]."""


@ATTENTIONS.register("linformer")
def linformer(config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> nn.Module:
    """Make Linformer attention; in the decoder of an encoder-decoder, plain grouped-query attention instead."""
    if config.family == "encoder_decoder" and (pattern.is_cross_attention or pattern.builtin_mask == "causal"):
        return GroupedQueryAttention(config.with_changes({"attention": {"name": "gqa"}}), initial, pattern)
    return LinformerAttention(config, initial, pattern)


def shares_projection(config: ModelConfig) -> bool:
    """Return whether all layers share one sequence projection."""
    return getattr(config.attention, "share", None) == "layerwise"


def make_layerwise_projection(
    config: ModelConfig, uses_projection: Sequence[bool], initial: Initialiser
) -> "SequenceProjection | None":
    """Make the projection that the marked layers share; None without any. Raises UsageError if their sizes differ."""
    options = [config.layer_config(depth).attention for depth, is_used in enumerate(uses_projection) if is_used]
    linformers = [require_variant(attention, LinformerAttentionConfig, "model.attention") for attention in options]
    if len({(attention.max_length, attention.projected_length) for attention in linformers}) > 1:
        raise UsageError(
            "model.attention.share = 'layerwise' is one projection for all layers, but model.layer_type changes "
            "max_length or projected_length: give all layers the same, or choose share = 'key_value'"
        )
    return SequenceProjection(linformers[0], initial) if linformers else None


class LinformerAttention(HeadProjections):
    """softmax(q (E k)ᵀ · scale) (F v) with R keys and values for each document. Padding counts as one document."""

    tp_plan = (
        ("", "gather_input"),
        ("w[qkv]", "colwise"),
        ("wo", "rowwise"),
        ("dropout", "local_shard_dropout"),
    )
    cp_plan = "all_reduce"

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        options = require_variant(config.attention, LinformerAttentionConfig, "model.attention")
        require_full(config)
        if pattern.builtin_mask != "all" or config.position.name not in ("learned", "sinusoidal", "none"):
            raise UsageError(
                "model.attention.name = 'linformer' mixes keys of all positions, later ones too, so it would leak the "
                f"future in family = {config.family!r} with position.name = {config.position.name!r}: choose family = "
                "'encoder' or 'encoder_decoder', and position.name = 'learned', 'sinusoidal' or 'none'"
            )
        super().__init__(config, initial, bias=options.bias)
        self.channels = options.n_heads * self.head_dim
        self.length, self.rank = options.max_length, options.projected_length
        projection = PerHeadSequenceProjection if options.share == "none" else SequenceProjection
        self.of_keys = None if options.share == "layerwise" else projection(options, initial)
        self.of_values = projection(options, initial) if options.share in ("none", "headwise") else None
        self.options = AttentionOptions(options.scale, dropout=options.dropout)
        self.dropout = Dropout(options.dropout, "attention")
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D]. bias: the projection [P, R] if all layers share it. Raises UsageError for too long rows."""
        if sequence.length > self.length:
            raise UsageError(
                f"rows have {sequence.length} tokens, but model.attention.max_length = {self.length}: shorten "
                "the rows, or raise max_length"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._split_heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        key_projection = bias if self.of_keys is None else self.of_keys.weight
        assert key_projection is not None
        projections = key_projection, key_projection if self.of_values is None else self.of_values.weight
        rng_keys_BNT = self.dropout.make_head_rng_keys(sequence, q_BNTH.shape[1])
        if isinstance(sequence, SequenceShard):
            heads_BNTH = self._attend_shard(projections, q_BNTH, k_BNTH, v_BNTH, rng_keys_BNT, sequence)
        else:
            # One document after the other: time and memory are linear in tokens for any number of documents.
            outputs = []
            for span in sequence.document_spans():
                index = _index_span(*span)
                rng_keys = None if rng_keys_BNT is None else rng_keys_BNT[index]
                document = q_BNTH[index], k_BNTH[index], v_BNTH[index]
                outputs.append(self._attend_documents(projections, *document, rng_keys))
            heads_BNTH = _join_documents(outputs, len(x_BTD))
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the projections; each key and value goes into `rank` sums, and each query attends to
        `rank` keys."""
        pairs = 4 * self.rank * tokens.n * self.channels
        return sum_costs((self.wq, self.wk, self.wv, self.wo), tokens) + Cost(
            attention_macs=pairs, visible_attention_macs=pairs
        )

    def _attend_documents(
        self, projections: KVProjections, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, rng_keys_BNT: Tensor | None
    ) -> Tensor:
        """Return [B, N, T, H] for rows that are one document each."""
        tokens = k_BNTH.shape[2]
        k_BNRH, v_BNRH = (
            project_sequence(x, weight[:tokens]) for x, weight in zip((k_BNTH, v_BNTH), projections, strict=True)
        )
        return self._attend(q_BNTH, k_BNRH, v_BNRH, rng_keys_BNT)

    def _attend(self, q_BNTH: Tensor, k_BNRH: Tensor, v_BNRH: Tensor, rng_keys_BNT: Tensor | None) -> Tensor:
        shared_arguments = k_BNRH, v_BNRH, FULL_MASK, None, self.options
        request = AttentionRequest.from_inputs(
            q_BNTH, k_BNRH, FULL_MASK, self.options, has_dropout=rng_keys_BNT is not None
        )
        kernel = None if request.has_dropout or request.device == "cpu" else choose_kernel(request)
        log_kernel(kernel.name if kernel else "products", f"Linformer(rank={self.rank})", request)
        if kernel:
            return kernel.run(q_BNTH, *shared_arguments, None)
        bytes_per_query = k_BNRH.shape[:3].numel() * q_BNTH.element_size()
        chunk_size = max(1, min(MAX_QUERIES_PER_CHUNK, MAX_SCORE_BYTES // max(1, bytes_per_query)))
        if q_BNTH.shape[2] <= chunk_size:
            return attention_reference(q_BNTH, *shared_arguments, rng_keys_BNT)
        chunks = q_BNTH.split(chunk_size, 2)
        rng_keys = [None] * len(chunks) if rng_keys_BNT is None else rng_keys_BNT.split(chunk_size, 2)
        return torch.cat(
            [attention_reference(q, *shared_arguments, keys) for q, keys in zip(chunks, rng_keys, strict=True)], 2
        )

    def _attend_shard(
        self,
        projections: KVProjections,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        v_BNTH: Tensor,
        rng_keys_BNT: Tensor | None,
        shard: SequenceShard,
    ) -> Tensor:
        """Return [B, N, T, H] for a rank's share of the tokens. Projected keys and values are summed over ranks."""
        indices_of_documents, projected = [], []
        token_indices = to_host(shard.token_indices)
        for row, start, end in shard.full_sequence.document_spans():
            first, last = torch.searchsorted(token_indices, torch.tensor([start, end])).tolist()
            index = _index_span(row, first, last)
            indices_of_documents.append(index)
            positions_T = shard.token_indices[first:last] - start
            keys_values = [
                project_sequence(x[index], weight[positions_T])
                for x, weight in zip((k_BNTH, v_BNTH), projections, strict=True)
            ]
            projected.append(torch.cat(keys_values, -1))
        summed = self.all_reduce(torch.cat(projected)).split([len(tensor) for tensor in projected])
        outputs = []
        for index, keys_values in zip(indices_of_documents, summed, strict=True):
            k, v = keys_values.chunk(2, -1)
            outputs.append(self._attend(q_BNTH[index], k, v, None if rng_keys_BNT is None else rng_keys_BNT[index]))
        return _join_documents(outputs, len(q_BNTH))


def _index_span(row: int | None, start: int, end: int) -> tuple[slice, slice, slice]:
    """Return the index of a document in [B, N, T, H]; row None: of all rows."""
    return slice(None) if row is None else slice(row, row + 1), slice(None), slice(start, end)


def _join_documents(outputs: Sequence[Tensor], n_rows: int) -> Tensor:
    """Return [B, N, T, H] of documents [1, N, t, H], row after row, or of all rows at once."""
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(list(outputs), 2)[0].unflatten(1, (n_rows, -1)).transpose(0, 1)


class SequenceProjection(nn.Module):
    """A projection along the sequence [P, R], shared by all heads of a layer or of all layers."""

    tp_plan = (("", "replicated_partial_grad"),)

    def __init__(self, options: LinformerAttentionConfig, initial: Initialiser) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self._shape(options)))
        self.initial = {"weight": initial("relative", options.max_length, options.projected_length)}

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (options.max_length, options.projected_length)

    def forward(self) -> Tensor:
        return self.weight


class PerHeadSequenceProjection(SequenceProjection):
    """A projection along the sequence for each head, [P, R, N]."""

    tp_plan = (("", "shard_last_dim"),)

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (options.max_length, options.projected_length, options.n_heads)


def project_sequence(x_BNTH: Tensor, weight: Tensor) -> Tensor:
    """Project keys or values [B, N, T, H] to [B, N, R, H]. weight: [T, R], or [T, R, N] with one matrix a head."""
    if weight.dim() == 3:
        return torch.einsum("trn,bnth->bnrh", weight, x_BNTH)
    # One matrix product for all heads: per-head products would need a sum of per-head gradients.
    n_heads = x_BNTH.shape[1]
    return (weight.T @ x_BNTH.transpose(1, 2).flatten(2)).unflatten(2, (n_heads, -1)).transpose(1, 2)
