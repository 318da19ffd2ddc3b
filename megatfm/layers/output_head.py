"""Output heads: hidden vectors to logits, or to a loss without holding all logits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.errors import UsageError
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import Constant, Initialiser, make_initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.loss_terms import PairFields, PairSums, Preference, compute_preference_terms
from megatfm.layers.norm import make_norm
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy
from megatfm.ops.transfer import find_true_indices, to_host
from megatfm.registry import Registry

# B batch, T tokens, S tokens of a full row, M tokens with targets, D model width, E embedding width, V vocabulary
# C classes, P width of a position in a span

DEFAULT_MASKED_FRACTION = 0.15
"""Default share of masked tokens, the only ones that a sparse head computes."""


def count_predicted_tokens(tokens: TokenCounts) -> TokenCounts:
    """Return the tokens that a sparse head computes: those with targets, or a default share of all."""
    fraction = DEFAULT_MASKED_FRACTION if tokens.target_fraction is None else tokens.target_fraction
    return tokens.with_count(tokens.n * fraction)


class CrossEntropy(nn.Module):
    """Summed cross-entropy of hidden vectors; tensor parallelism replaces it by a vocabulary-parallel loss."""

    def __init__(self, options: LogitOptions) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        targets_M: Tensor,
        bias_V: Tensor | None,
        losses_M: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> Tensor:
        """Return the sum. losses_M: filled with the tokens' losses. weights_M: their factors."""
        options = self.options if self.training else replace(self.options, smoothing=0.0)
        return cross_entropy(hidden_ME, weight_VE, targets_M, bias_V, options, losses_M=losses_M, weights_M=weights_M)


class RowLossRecorder:
    """Records the losses of rows of micro-batches at a language-model head, without gradients."""

    def __init__(self) -> None:
        self._calls: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def allocate_losses(self, targets_BT: Tensor, indices_M: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a tensor [M] for the losses of a call. indices_M: its tokens in [B · T]; None: all of them."""
        losses_M = targets_BT.new_zeros(targets_BT.numel() if indices_M is None else len(indices_M), dtype=dtype)
        self._calls.append((targets_BT, indices_M, losses_M))
        return losses_M

    def sum_losses_by_row(self, targets_BT: Tensor) -> Tensor | None:
        """Return the summed losses [B] of the call with these targets, in float64; None if there was none."""
        for recorded_BT, indices_M, losses_M in self._calls:
            if recorded_BT.data_ptr() == targets_BT.data_ptr():
                losses = losses_M.double()
                if indices_M is not None:
                    losses = losses.new_zeros(targets_BT.numel()).index_copy_(0, indices_M, losses)
                return losses.view(targets_BT.shape).sum(1)
        return None


class PredictionHeadTransform(nn.Module):
    """BERT's dense layer, activation and norm before the output matrix, from D to E."""

    tp_plan = (("dense", "replicated_partial_grad"), ("norm", "replicated_partial_grad"))

    def __init__(self, config: ModelConfig, initial: Initialiser, d_in: int) -> None:
        super().__init__()
        width = config.embedding_width
        self.dense = Linear(d_in, width, initial("dense", d_in, width), bias=config.lm_head.transform_bias)
        self.activation = ACTIVATIONS.get(config.ffn.activation).function
        self.norm = make_norm(config, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))


class LMHead(nn.Module):
    """Logits [B, T, V] of hidden vectors [B, T, D], or, given targets [B, T], their summed cross-entropy.

    token_mask_BT: return logits [M, V] of these tokens only. pairs: the targets are those of pairs of answers; returns
    the sums [3] of `PREFERENCE_TERMS`. sparse: compute only tokens with targets, for objectives where these are few, as
    in masked language models.
    """

    tp_plan = (("", "vocab_parallel_head"),)

    cp_plan = "local"

    recorder: RowLossRecorder | None = None
    """Set while row losses are requested."""
    preference = Preference()
    """Set by the preference objective."""

    def __init__(self, config: ModelConfig, tied_to: Embedding | None, *, sparse: bool = False) -> None:
        super().__init__()
        initial, width, vocabulary = make_initialiser(config), config.embedding_width, config.vocab_size or 0
        self.transform: nn.Module | None = None
        if config.lm_head.name == "transform":
            self.transform = PredictionHeadTransform(config, initial, config.d_model)
        elif width != config.d_model:
            self.transform = Linear(config.d_model, width, initial("dense", config.d_model, width))
        self.weight = tied_to.weight if tied_to else nn.Parameter(torch.empty(vocabulary, width))
        self.initial = {} if tied_to else {"weight": initial("head", width, vocabulary)}
        self.bias = nn.Parameter(torch.empty(vocabulary)) if config.lm_head.bias else None
        if config.lm_head.bias:
            self.initial["bias"] = Constant(0.0)
        self.scale = config.head_scale * (config.mup.base_width / config.d_model if config.mup else 1.0)
        self.softcap, self.sparse = config.lm_head.softcap, sparse
        self.loss = CrossEntropy(LogitOptions(config.lm_head.softcap, config.lm_head.label_smoothing))
        self.pair_sums = PairSums()

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the tokens that are computed; a tied output matrix counts here, too."""
        return default_cost(self, count_predicted_tokens(tokens) if self.sparse else tokens)

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None = None,
        *,
        token_mask_BT: Tensor | None = None,
        pairs: PairFields | None = None,
    ) -> Tensor:
        if targets_BT is None:
            hidden = hidden_BTD
            if token_mask_BT is not None:
                hidden = hidden_BTD[find_true_indices(to_host(token_mask_BT), hidden_BTD.device)]
            logits = F.linear(self._transform_and_scale(hidden), self.weight, self.bias)
            return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        hidden_MD, targets_M, indices_M = hidden_BTD.flatten(0, 1), targets_BT.flatten(), None
        if self.sparse:
            (indices_M,) = find_true_indices(to_host(targets_BT).flatten() != IGNORE, targets_M.device)
            hidden_MD, targets_M = hidden_MD[indices_M], targets_M[indices_M]
        hidden_ME = self._transform_and_scale(hidden_MD)
        loss_dtype = torch.promote_types(hidden_ME.dtype, torch.float32)
        if pairs is not None:
            loss = partial(self.loss, hidden_ME, self.weight, targets_M, self.bias)
            return compute_preference_terms(loss, self.pair_sums, pairs, self.preference, loss_dtype)
        if self.recorder is None:
            return self.loss(hidden_ME, self.weight, targets_M, self.bias)
        losses_M = self.recorder.allocate_losses(targets_BT, indices_M, loss_dtype)
        return self.loss(hidden_ME, self.weight, targets_M, self.bias, losses_M)

    def _transform_and_scale(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.transform is None else self.transform(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale


HEADS: Registry[Callable[[ModelConfig, Any, Embedding | None], nn.Module]] = Registry("head (model.extra_heads)")
"""Heads besides the language-model head, built as `head(config, section, tokens)`; tokens: the token embedding or None.

A head is a module that is called with hidden vectors [B, T, D] and the fields of the batch that its `input_fields`
name, if the batch has all of them. Then it returns the sum of its loss `term` (by default named like the head), or a
dict of several terms. Without the fields it returns predictions, if it `predicts`. Its `optional_fields` are passed by
keyword if the batch has them, and `sequence`, the SequenceMetadata, if it `takes_sequence`."""


@HEADS.register("sentence")
class SentenceHead(nn.Module):
    """Classes of whole sequences, from the first token through a dense layer and tanh (Devlin et al. 2019).

    targets [B, T]: the class at each sequence's first token, −100 elsewhere.
    """

    input_fields = ("sentence_targets",)
    predicts = True

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    cp_plan = "local"

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d, classes = make_initialiser(config), config.d_model, section.classes
        self.pooler = Linear(d, d, initial("dense", d, d), bias=True)
        self.classifier = Linear(d, classes, initial("dense", d, classes), bias=True)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of one token of each row."""
        return default_cost(self, tokens.with_count(1))

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits [B, C] of each row's first token, or, given targets, the summed cross-entropy."""
        if targets_BT is None:
            return self.classifier(self.pool(hidden_BTD[:, 0]))
        rows_M, columns_M = find_true_indices(to_host(targets_BT) != IGNORE, targets_BT.device)
        logits_MC = self.classifier(self.pool(hidden_BTD[rows_M, columns_M]))
        loss_dtype = torch.promote_types(logits_MC.dtype, torch.float32)
        return F.cross_entropy(logits_MC.to(loss_dtype), targets_BT[rows_M, columns_M], reduction="sum")

    def pool(self, hidden: Tensor) -> Tensor:
        """Return the pooled vectors [..., D]."""
        return torch.tanh(self.pooler(hidden))


POSITION_WIDTH = 200
"""Width of the embedding of a token's position in its span (Joshi et al. 2020, section 3.2)."""
MAX_SPAN_POSITIONS = 64
"""Number of distinct positions in a span, which has at most 10 words."""


@HEADS.register("boundary")
class SpanBoundaryHead(nn.Module):
    """Predicts masked tokens from the boundaries of their spans (SpanBERT, Joshi et al. 2020).

    Two layers of dense, GELU and norm on [left boundary; right boundary; position in the span], then the vocabulary.
    """

    input_fields = ("targets", "span_left", "span_right")
    full_row_fields = ("span_left", "span_right")
    cp_plan = "local"
    predicts = False

    tp_plan = (
        ("", "vocab_parallel_head"),
        ("positions", "replicated_partial_grad"),
        ("dense[12]", "replicated_partial_grad"),
        ("norm[12]", "replicated_partial_grad"),
    )

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None) -> None:
        super().__init__()
        if tokens is None:
            raise UsageError("model.extra_heads.boundary predicts tokens: set model.embedding.name = 'tokens'")
        initial, d, width = make_initialiser(config), config.d_model, config.embedding_width
        d_in, n_positions = 2 * d + POSITION_WIDTH, MAX_SPAN_POSITIONS
        self.gather_boundaries = SpanBoundaryGather()
        self.positions = Embedding(n_positions, POSITION_WIDTH, initial("position", n_positions, POSITION_WIDTH))
        self.dense1 = Linear(d_in, d, initial("dense", d_in, d), bias=True)
        self.norm1 = make_norm(config, d)
        self.dense2 = Linear(d, width, initial("dense", d, width), bias=True)
        self.norm2 = make_norm(config, width)
        self.weight = tokens.weight
        self.bias = nn.Parameter(torch.empty(config.vocab_size or 0))
        self.initial = {"bias": Constant(0.0)}
        self.loss = CrossEntropy(LogitOptions())

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the masked tokens."""
        return default_cost(self, count_predicted_tokens(tokens))

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        left_BT: Tensor,
        right_BT: Tensor,
        row_left_BS: Tensor | None = None,
        row_right_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the summed cross-entropy of masked tokens.

        left, right: distances to the tokens around the span; 0: not masked. row_left, row_right: those of full rows, if
        the tokens are a shard of them.
        """
        rows, columns = find_true_indices(to_host(left_BT) > 0, left_BT.device)
        position_MP = self.positions((left_BT[rows, columns] - 1).clamp(max=MAX_SPAN_POSITIONS - 1))
        boundaries = self.gather_boundaries(hidden_BTD, left_BT, right_BT, row_left_BS, row_right_BS)
        inner_MD = self.norm1(F.gelu(self.dense1(torch.cat([*boundaries, position_MP], dim=-1))))
        inner_ME = self.norm2(F.gelu(self.dense2(inner_MD)))
        return self.loss(inner_ME, self.weight, targets_BT[rows, columns], self.bias)


class SpanBoundaryGather(nn.Module):
    """Gathers the tokens around each span; context parallelism replaces it to fetch them from other ranks."""

    cp_plan = "span_boundary"

    def forward(
        self,
        hidden_BTD: Tensor,
        left_BT: Tensor,
        right_BT: Tensor,
        row_left_BS: Tensor | None,
        row_right_BS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden vectors [M, D] left and right of masked tokens' spans. Arguments: see
        `SpanBoundaryHead`."""
        rows, columns = find_true_indices(to_host(left_BT) > 0, left_BT.device)
        left_M, right_M = left_BT[rows, columns], right_BT[rows, columns]
        return hidden_BTD[rows, columns - left_M], hidden_BTD[rows, columns + right_M]
