"""Classes of images: pools over an image's tokens, and the head that classifies the pooled vectors."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost, sum_costs
from megatfm.errors import MegatfmError
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.transfer import find_true_indices, to_host

# B batch, T tokens, M images that count, I most images of a row, N heads, D model width, C classes


class ImageMean(nn.Module):
    """The mean of each image's patches; special tokens and padding are left out."""

    cp_plan = "all_reduce"

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(self, hidden_BTD: Tensor, index_M: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return vectors [M, D] of the images at these indices (`index_documents`)."""
        precise = torch.promote_types(hidden_BTD.dtype, torch.float32)
        sums_BID = self.all_reduce(_find_patches(sequence).to(precise) @ hidden_BTD.to(precise))
        counts_BI1 = _find_patches(sequence.full_sequence).sum(-1, keepdim=True).clamp(min=1)
        means_BID = (sums_BID / counts_BI1).to(hidden_BTD.dtype)
        return means_BID.flatten(0, 1)[index_M]


class AttentionPool(nn.Module):
    """A learned query that attends to each image's tokens, then a feed-forward network (Zhai et al. 2022, section 3.3,
    as in SigLIP): y = attention(query, x), y + ffn(norm(y))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        initial, d, d_ff = make_initialiser(config), config.d_model, config.ffn.d_ff
        self.n_heads = config.attention.n_heads
        self.query = nn.Parameter(torch.empty(1, d))
        self.initial, self.roles = {"query": initial("embedding", 1, d)}, {"query": "embedding"}
        self.wq, self.wk, self.wv = (Linear(d, d, initial(role, d, d), bias=True) for role in ("query", "key", "value"))
        self.core = PoolingAttention()
        self.wo = Linear(d, d, initial("out", d, d), bias=True)
        self.norm = make_norm(config)
        self.w_up = Linear(d, d_ff, initial("ffn_in", d, d_ff), bias=True)
        self.activation = ACTIVATIONS.get(config.ffn.activation).function
        self.w_down = Linear(d_ff, d, initial("ffn_out", d_ff, d), bias=True)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of keys and values of all tokens, and of the rest for one token of each row."""
        head_cost = sum_costs((self.wq, self.wo, self.norm, self.w_up, self.w_down), tokens.with_count(1))
        return sum_costs((self.wk, self.wv), tokens) + head_cost

    def forward(self, hidden_BTD: Tensor, index_M: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return vectors [M, D] of the images at these indices (`index_documents`)."""
        q_NH = self.wq(self.query)[0].unflatten(-1, (self.n_heads, -1))
        k_BTNH, v_BTNH = (w(hidden_BTD).unflatten(-1, (self.n_heads, -1)) for w in (self.wk, self.wv))
        heads_BIND = self.core(q_NH, k_BTNH, v_BTNH, sequence.find_document_members())
        y_MD = self.wo(heads_BIND.flatten(-2).flatten(0, 1)[index_M])
        return y_MD + self.w_down(self.activation(self.w_up(self.norm(y_MD))))


class PoolingAttention(nn.Module):
    """softmax(q kᵀ / √H) v of one query over the tokens of each image."""

    cp_plan = "pooling_attention"

    def forward(self, q_NH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, is_member_BIT: Tensor) -> Tensor:
        """Return [B, I, N, H], over the tokens of each image (`is_member`). Images without tokens get unused values."""
        weights_BINT = self.compute_scores(q_NH, k_BTNH, is_member_BIT).softmax(-1).to(v_BTNH.dtype)
        return torch.einsum("bint,btnh->binh", weights_BINT, v_BTNH)

    @staticmethod
    def compute_scores(q_NH: Tensor, k_BTNH: Tensor, is_member_BIT: Tensor) -> Tensor:
        """Return [B, I, N, T] in float32 at least; tokens of other images have the lowest finite value."""
        precise = torch.promote_types(k_BTNH.dtype, torch.float32)
        scores_BNT = torch.einsum("nh,btnh->bnt", q_NH, k_BTNH).to(precise) * q_NH.shape[-1] ** -0.5
        # Not −∞: a row may have fewer images than another, and a softmax over no tokens would be NaN.
        return scores_BNT[:, None].masked_fill(~is_member_BIT[:, :, None], torch.finfo(precise).min)


def _find_patches(sequence: SequenceMetadata) -> Tensor:
    """Return boolean [B, I, T]: which tokens are patches of each image."""
    members_BIT = sequence.find_document_members()
    return members_BIT if sequence.grid is None else members_BIT & (sequence.grid[..., 0] >= 0)[:, None]


def index_documents(sequence: SequenceMetadata, token_M: Tensor, other_side: SequenceMetadata | None = None) -> Tensor:
    """Return the index [M] of each token's document among those of all rows, `max_documents_per_row` for each row.

    token_M: indices of tokens, counted over all rows. other_side: metadata of these tokens, if they are on the other
    side of a pair of rows, whose documents have the same numbers as those of `sequence`.
    """
    tokens = other_side or sequence
    row_M = token_M // tokens.positions.shape[1]
    return row_M * sequence.max_documents_per_row + tokens.documents_or_zeros.flatten()[token_M]


def find_boundary_tokens(sequence: SequenceMetadata, *, last: bool) -> Tensor:
    """Return indices [M], counted over all rows, of the first tokens of documents, or of their last ones."""
    host = sequence.on_host()
    row = host.full_sequence
    chosen_BT = row.positions == 0
    if last and row.documents is None:  # each row is one document
        chosen_BT = torch.arange(chosen_BT.shape[1]).expand_as(chosen_BT) == chosen_BT.shape[1] - 1
    elif last and row.documents is not None:
        next_BT = F.pad(row.documents[:, 1:], (0, 1), value=-1)
        chosen_BT = row.documents != next_BT
    if row.documents is not None:  # padding has position 0 as well
        chosen_BT = chosen_BT & (row.documents >= 0)
    if isinstance(host, SequenceShard):
        chosen_BT = chosen_BT[:, host.token_indices]
    return find_true_indices(chosen_BT.flatten(), sequence.positions.device)[0]


OnClasses = Callable[[Tensor, Tensor], None]
"""Receives logits [M, C] and labels [M] of a micro-batch's images in evaluation, in the order of rows."""
TOP_K = (1, 5)
"""Values of k of the metrics `topk`: the share of images whose label is among the k likeliest classes."""


@HEADS.register("classifier")
class ClassifierHead(nn.Module):
    """Classes of images. labels [B, T] hold the class at each image's first token and −100 elsewhere.

    mixed_labels [B, T]: the other class of mixed images; label_weights [B, T]: the first one's share.
    """

    input_fields = ("labels",)
    optional_fields = ("mixed_labels", "label_weights")
    takes_sequence = True
    predicts = True
    term = "classifier"

    cp_plan = "local"
    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"), ("pool.*", "replicated"))

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d = make_initialiser(config), config.d_model
        self.reads_class_token = "class" in section.pool
        pools = {"mean": ImageMean, "class_mean": ImageMean, "attention": lambda: AttentionPool(config)}
        self.pool: nn.Module | None = pools[section.pool]() if section.pool in pools else None
        width = 2 * d if section.pool == "class_mean" else d
        self.dense = Linear(width, d, initial("dense", width, d), bias=True) if section.hidden else None
        width = d if section.hidden else width
        self.classifier = Linear(
            width, section.n_classes, initial("dense", width, section.n_classes), bias=section.bias
        )
        self.label_smoothing = float(section.label_smoothing)
        self.on_classes: OnClasses | None = None
        """Set while an evaluation collects predictions."""

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of one token of each row, and of the pool's."""
        layers = [layer for layer in (self.dense, self.classifier) if layer is not None]
        pooled = Cost() if self.pool is None else sum_costs([self.pool], tokens)
        return sum((default_cost(layer, tokens.with_count(1)) for layer in layers), pooled)

    def forward(
        self,
        hidden_BTD: Tensor,
        labels_BT: Tensor | None = None,
        *,
        sequence: SequenceMetadata | None,
        mixed_labels: Tensor | None = None,
        label_weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the logits [images, C] of all images in the order of rows, or, given labels, the summed cross-entropy.

        In evaluation also the numbers of right images: `top1`, and `top5` if there are more than five classes. Raises
        MegatfmError in a model that doesn't pass its sequence on.
        """
        if sequence is None:
            raise MegatfmError("the head 'classifier' needs the sequence: a family passes it to Model.output")
        if labels_BT is None:
            return self._compute_logits(hidden_BTD, find_boundary_tokens(sequence, last=False), sequence)
        (token_M,) = find_true_indices(to_host(labels_BT).flatten() != IGNORE, labels_BT.device)
        logits_MC = self._compute_logits(hidden_BTD, token_M, sequence)
        logits_MC = logits_MC.to(torch.promote_types(logits_MC.dtype, torch.float32))
        if mixed_labels is None or label_weights is None:
            labels_M = labels_BT.flatten()[token_M]
            loss = self._compute_cross_entropy(logits_MC, labels_M).sum()
            if self.training:
                return loss
            if self.on_classes is not None:
                self.on_classes(logits_MC, labels_M)
            return {self.term: loss, **count_topk_correct(logits_MC, labels_M)}
        weights_M = label_weights.flatten()[token_M].to(logits_MC.dtype)
        first_M, second_M = (
            self._compute_cross_entropy(logits_MC, labels.flatten()[token_M]) for labels in (labels_BT, mixed_labels)
        )
        return (weights_M * first_M + (1 - weights_M) * second_M).sum()

    def _compute_cross_entropy(self, logits_MC: Tensor, labels_M: Tensor) -> Tensor:
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits_MC, labels_M, reduction="none", label_smoothing=smoothing)

    def _compute_logits(self, hidden_BTD: Tensor, token_M: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return logits [M, C] of the images whose first tokens are at `token_M`."""
        pooled = [hidden_BTD.flatten(0, 1)[token_M]] if self.reads_class_token else []
        if self.pool is not None:
            pooled.append(self.pool(hidden_BTD, index_documents(sequence, token_M), sequence))
        x_MD = torch.cat(pooled, dim=-1)
        logits_MC: Tensor = self.classifier(x_MD if self.dense is None else self.dense(x_MD).tanh())
        return logits_MC


def count_topk_correct(logits_MC: Tensor, labels_M: Tensor) -> dict[str, Tensor]:
    """Count the images whose label is among the likeliest classes; of equal logits the lower class is likelier.

    An image with a NaN logit is not counted, so that nothing is right by accident.
    """
    classes_MC = logits_MC.argsort(dim=-1, descending=True, stable=True)
    is_right_MC = (classes_MC == labels_M[:, None]) & ~logits_MC.isnan().any(-1, keepdim=True)
    return {f"top{k}": is_right_MC[:, :k].sum() for k in TOP_K if k < logits_MC.shape[-1]}
