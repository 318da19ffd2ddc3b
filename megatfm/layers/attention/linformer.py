"""Linformer's attention (Wang et al. 2020): keys and values of a document are projected to a fixed number of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from megatfm.config import LinformerAttentionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts, total_cost
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, HeadProjections, log_once
from megatfm.layers.attention.gqa import GroupedQueryAttention
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.local import require_full
from megatfm.layers.attention.patterns.pattern import AttentionPattern
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.sequence import SequenceMetadata, SequenceShard
from megatfm.ops.attention.kernels import AttentionRequest, choose
from megatfm.ops.attention.mask import FULL_MASK
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.transfer import to_host

# B batch, T tokens, D model width, N heads, H head width, P places of a document, R rank

MAX_QUERIES_PER_CHUNK = 4096
"""Queries that a CPU takes at once: of more, what is in between is too large for caches, and for memory that is kept.
Written-out products are faster there than the fused kernel (docs/LOG.md, 2026-11-23)."""
MAX_SCORE_BYTES = 24 * 2**20
"""Scores of a piece take no more: blocks of 32 MB would be mapped anew each time (`megatfm.train.profiling`)."""

KVProjections = tuple[Tensor, Tensor]
"""Projections of keys and of values."""


@ATTENTIONS.register("linformer")
def linformer(config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> nn.Module:
    """In an encoder-decoder, the encoder's; its decoder looks at all earlier tokens, and at all of the memory."""
    if config.family == "encoder_decoder" and (
        pattern.is_cross_attention or pattern.builtin_mask == "causal"
    ):
        return GroupedQueryAttention(config.with_changes({"attention": {"name": "gqa"}}), initial, pattern)
    return LinformerAttention(config, initial, pattern)


def shares_projection(config: ModelConfig) -> bool:
    """Whether a layer's projection is that of all layers of its encoder."""
    return getattr(config.attention, "share", None) == "layerwise"


def layerwise_projection(
    config: ModelConfig, sketched: Sequence[bool], initial: Initialiser
) -> "SequenceProjection | None":
    """The projection that these layers of an encoder have in common. Raises UsageError where its sizes differ."""
    options = [
        config.layer_config(depth).attention for depth, is_sketched in enumerate(sketched) if is_sketched
    ]
    linformers = [
        require_variant(attention, LinformerAttentionConfig, "model.attention") for attention in options
    ]
    if len({(attention.max_length, attention.projected_length) for attention in linformers}) > 1:
        raise UsageError(
            "model.attention.share = 'layerwise' is one projection for all layers, and model.layer_type has "
            "other lengths "
            "or ranks: give all the same, or choose share = 'key_value'"
        )
    return SequenceProjection(linformers[0], initial) if linformers else None


class LinformerAttention(HeadProjections):
    """softmax(q (E k)ᵀ · scale) (F v): each document has R keys and values. Padding is a document of its own."""

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
                "model.attention.name = 'linformer' mixes keys of all places, later ones too, so that it leaks the "
                f"future in family = {config.family!r} with position.name = {config.position.name!r}: choose family = "
                "'encoder' or 'encoder_decoder', and position.name = 'learned', 'sinusoidal' or 'none'"
            )
        super().__init__(config, initial, bias=options.bias)
        self.channels = options.n_heads * self.head_dim
        self.length, self.rank = options.max_length, options.projected_length
        sketch = PerHeadSequenceProjection if options.share == "none" else SequenceProjection
        self.of_keys = None if options.share == "layerwise" else sketch(options, initial)
        self.of_values = sketch(options, initial) if options.share in ("none", "headwise") else None
        self.variant = AttentionOptions(options.scale, dropout=options.dropout)
        self.dropout = Dropout(options.dropout, "attention")
        self.summed = nn.Identity()  # where sums over some tokens of documents become those over all

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, T, D]. bias: the projection [P, R], where all layers share it."""
        if sequence.length > self.length:
            raise UsageError(
                f"rows of {sequence.length} tokens, but model.attention.max_length = {self.length}: make the rows "
                "shorter, or length longer"
            )
        q_BNTH, k_BNTH, v_BNTH = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        key_sketch = bias if self.of_keys is None else self.of_keys.weight
        assert key_sketch is not None
        sketches = key_sketch, key_sketch if self.of_values is None else self.of_values.weight
        rng_keys_BNT = self.dropout.head_rng_keys(sequence, q_BNTH.shape[1])
        if isinstance(sequence, SequenceShard):
            heads_BNTH = self._parts(sketches, q_BNTH, k_BNTH, v_BNTH, rng_keys_BNT, sequence)
        elif sequence.document_ids() is None:
            heads_BNTH = self._document(sketches, q_BNTH, k_BNTH, v_BNTH, rng_keys_BNT)
        else:
            # One document after the other: work and memory grow with their tokens, however many a row has.
            places_BT = sequence.on_host().positions_in_document()[0].expand(len(x_BTD), -1)
            rows = []
            for row, places_T in enumerate(places_BT):
                parts = []
                for start, end in pairwise([*(places_T == 0).nonzero()[:, 0].tolist(), len(places_T)]):
                    at = slice(row, row + 1), slice(None), slice(start, end)
                    rng_keys = None if rng_keys_BNT is None else rng_keys_BNT[at]
                    parts.append(self._document(sketches, q_BNTH[at], k_BNTH[at], v_BNTH[at], rng_keys))
                rows.append(torch.cat(parts, 2))
            heads_BNTH = torch.cat(rows)
        return self.wo(heads_BNTH.transpose(1, 2).flatten(2))

    def cost(self, tokens: TokenCounts) -> Cost:
        """A key or value goes into `rank` of them, and a query looks at as many."""
        pairs = 4 * self.rank * tokens.n * self.channels
        return total_cost((self.wq, self.wk, self.wv, self.wo), tokens) + Cost(
            attention_macs=pairs, visible_attention_macs=pairs
        )

    def _document(
        self,
        sketches: KVProjections,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        v_BNTH: Tensor,
        rng_keys_BNT: Tensor | None,
    ) -> Tensor:
        """[B, N, T, H] of documents that begin at the first token; no other is in them."""
        tokens = k_BNTH.shape[2]
        k_BNRH, v_BNRH = (
            project_sequence(x, of[:tokens]) for x, of in zip((k_BNTH, v_BNTH), sketches, strict=True)
        )
        return self._looked(q_BNTH, k_BNRH, v_BNRH, rng_keys_BNT)

    def _looked(self, q_BNTH: Tensor, k_BNRH: Tensor, v_BNRH: Tensor, rng_keys_BNT: Tensor | None) -> Tensor:
        shared_arguments = k_BNRH, v_BNRH, FULL_MASK, None, self.variant
        case = AttentionRequest.from_inputs(
            q_BNTH, k_BNRH, FULL_MASK, self.variant, drops=rng_keys_BNT is not None
        )
        kernel = None if case.has_dropout or case.device == "cpu" else choose(case)
        log_once(kernel.name if kernel else "products", f"Linformer(rank={self.rank})", case)
        if kernel:
            return kernel.run(q_BNTH, *shared_arguments, None)
        bytes_per_query = k_BNRH.shape[:3].numel() * q_BNTH.element_size()
        piece = max(1, min(MAX_QUERIES_PER_CHUNK, MAX_SCORE_BYTES // bytes_per_query))
        if q_BNTH.shape[2] <= piece:
            return attention_reference(q_BNTH, *shared_arguments, rng_keys_BNT)
        pieces = q_BNTH.split(piece, 2)
        rng_keys = [None] * len(pieces) if rng_keys_BNT is None else rng_keys_BNT.split(piece, 2)
        return torch.cat(
            [
                attention_reference(q, *shared_arguments, keys)
                for q, keys in zip(pieces, rng_keys, strict=True)
            ],
            2,
        )

    def _parts(
        self,
        of: KVProjections,
        q_BNTH: Tensor,
        k_BNTH: Tensor,
        v_BNTH: Tensor,
        rng_keys_BNT: Tensor | None,
        part: SequenceShard,
    ) -> Tensor:
        """[B, N, T, H] of some of the tokens of documents: what is here of each is sketched, and these are summed."""
        documents, sketches = [], []
        indices, row_lengths = (
            to_host(part.token_indices),
            part.full_sequence.on_host().positions_in_document()[0],
        )
        for row, places_S in enumerate(row_lengths.expand(len(q_BNTH), -1)):
            for start, end in pairwise([*(places_S == 0).nonzero()[:, 0].tolist(), len(places_S)]):
                first, last = torch.searchsorted(indices, torch.tensor([start, end])).tolist()
                at = slice(row, row + 1), slice(None), slice(first, last)
                documents.append(at)
                places_T = part.token_indices[at[2]] - start
                outputs = [
                    project_sequence(x[at], tensor[places_T])
                    for x, tensor in zip((k_BNTH, v_BNTH), of, strict=True)
                ]
                sketches.append(torch.cat(outputs, -1))
        k_MNRH, v_MNRH = self.summed(torch.cat(sketches)).chunk(2, -1)
        results = []
        for i, at in enumerate(documents):
            rng_keys = None if rng_keys_BNT is None else rng_keys_BNT[at]
            results.append(self._looked(q_BNTH[at], k_MNRH[i : i + 1], v_MNRH[i : i + 1], rng_keys))
        rows = [
            [y for y, at in zip(results, documents, strict=True) if at[0].start == b]
            for b in range(len(q_BNTH))
        ]
        return torch.cat([torch.cat(row, 2) for row in rows])

    def reduced_numel(self, row: SequenceMetadata) -> int:
        """Numbers of a head that are summed where rows are cut: a document's `rank` keys and values."""
        documents = int((row.positions_in_document()[0] == 0).expand(len(row.positions), -1).sum())
        return documents * 2 * self.head_dim * self.rank


class SequenceProjection(nn.Module):
    """A matrix [P, R] for all heads of a layer, or of all layers."""

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
    """A matrix [P, R] for each head, the heads last."""

    tp_plan = (("", "shard_last_dim"),)

    def _shape(self, options: LinformerAttentionConfig) -> tuple[int, ...]:
        return (options.max_length, options.projected_length, options.n_heads)


def project_sequence(x_BNTH: Tensor, weight: Tensor) -> Tensor:
    """Keys or values of a document's tokens → [B, N, R, H]. weight: rows of their places in it, [T, R] or [T, R, N]."""
    if weight.dim() == 3:
        return torch.einsum("trn,bnth->bnrh", weight, x_BNTH)
    # Heads share it, so that one product serves them, and no gradient of each has to be summed.
    n_heads = x_BNTH.shape[1]
    return (weight.T @ x_BNTH.transpose(1, 2).flatten(2)).unflatten(2, (n_heads, -1)).transpose(1, 2)
