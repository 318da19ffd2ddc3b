"""Output heads: hidden vectors to logits, or to a loss without ever holding all logits."""

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
from megatfm.layers.initialisation import Constant, Initialiser, initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.preference import PairFields, PairSums, Preference, preference_terms
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy
from megatfm.ops.transfer import moved, to_host, true_places
from megatfm.registry import Registry

# B batch, T tokens, M tokens that count, D model width, E embedding width, V vocabulary, C classes


DEFAULT_MASKED_FRACTION = 0.15
"""Default share of tokens that are masked; these alone go through a sparse head."""


def predicted_tokens(tokens: TokenCounts) -> TokenCounts:
    """Tokens that go through a head for masked ones; a usual share where the objective says none."""
    return tokens.with_count(
        tokens.n * (DEFAULT_MASKED_FRACTION if tokens.target_fraction is None else tokens.target_fraction)
    )


class CrossEntropy(nn.Module):
    """The summed loss of hidden vectors: the seam at which a vocabulary-parallel loss takes over."""

    def __init__(self, variant: LogitOptions) -> None:
        super().__init__()
        self.variant = variant

    def forward(
        self,
        hidden_ME: Tensor,
        weight_VE: Tensor,
        targets_M: Tensor,
        bias_V: Tensor | None,
        losses_M: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> Tensor:
        """The sum; losses_M is filled with the tokens' losses. weights_M: factors on them."""
        variant = self.variant if self.training else replace(self.variant, smoothing=0.0)
        return cross_entropy(
            hidden_ME, weight_VE, targets_M, bias_V, variant, losses_M=losses_M, weights_M=weights_M
        )


class RowLossRecorder:
    """The losses of the rows of micro-batches at a head over the vocabulary, besides their sum; without gradients."""

    def __init__(self) -> None:
        self._calls: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def new_losses(self, targets_BT: Tensor, at_M: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a tensor [M] for the losses of a call. at_M: the places of its tokens; None: all of [B, T]."""
        losses_M = targets_BT.new_zeros(targets_BT.numel() if at_M is None else len(at_M), dtype=dtype)
        self._calls.append((targets_BT, at_M, losses_M))
        return losses_M

    def row_losses(self, targets_BT: Tensor) -> Tensor | None:
        """Return the summed losses [B] of the call with these targets, in float64; None where there was none."""
        for recorded_BT, at_M, losses_M in self._calls:
            if recorded_BT.data_ptr() == targets_BT.data_ptr():
                losses_M = losses_M.double()
                if at_M is not None:
                    losses_M = losses_M.new_zeros(targets_BT.numel()).index_copy_(0, at_M, losses_M)
                return losses_M.view(targets_BT.shape).sum(1)
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

    where [B, T]: logits [M, V] of these tokens alone. pairs: the targets are those of pairs of answers: sums [3] of
    `PREFERENCE_TERMS`, as `preference` says.

    Where few tokens have a target, as in masked language models, only those go through.
    """

    tp_plan = (("", "vocab_parallel_head"),)

    cp_plan = "local"

    recorder: RowLossRecorder | None = None
    """Set while the losses of rows are requested."""
    preference = Preference()
    """Set by the objective that trains preferences."""

    def __init__(self, config: ModelConfig, tied_to: Embedding | None, *, sparse: bool = False) -> None:
        super().__init__()
        initial, width, vocabulary = initialiser(config), config.embedding_width, config.vocab_size or 0
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
        """Its matrix, though shared with a table, is multiplied with the tokens that have a target."""
        return default_cost(self, predicted_tokens(tokens) if self.sparse else tokens)

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
                hidden = hidden_BTD[true_places(to_host(token_mask_BT), hidden_BTD.device)]
            logits = F.linear(self._last(hidden), self.weight, self.bias)
            return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        hidden_MD, targets_M, at_M = hidden_BTD.flatten(0, 1), targets_BT.flatten(), None
        if self.sparse:
            # By places that the host finds, since it has to know how many they are.
            at_M = moved((to_host(targets_BT).flatten() != IGNORE).nonzero()[:, 0], targets_M.device)
            hidden_MD, targets_M = hidden_MD[at_M], targets_M[at_M]
        hidden_ME = self._last(hidden_MD)
        if pairs is not None:
            loss = partial(self.loss, hidden_ME, self.weight, targets_M, self.bias)
            precise = torch.promote_types(hidden_ME.dtype, torch.float32)
            return preference_terms(loss, self.pair_sums, pairs, self.preference, precise)
        if self.recorder is None:
            return self.loss(hidden_ME, self.weight, targets_M, self.bias)
        precise = torch.promote_types(hidden_ME.dtype, torch.float32)
        losses_M = self.recorder.new_losses(targets_BT, at_M, precise)
        return self.loss(hidden_ME, self.weight, targets_M, self.bias, losses_M)

    def _last(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.transform is None else self.transform(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale


HEADS: Registry[Callable[[ModelConfig, Any, Embedding | None], nn.Module]] = Registry(
    "head (model.extra_heads)"
)
"""Heads besides the one over the vocabulary. Made as `head(config, section, tokens)`: tokens is the table of tokens, if
there is one. A head is a module that takes hidden vectors [B, T, D] and the fields of the batch that it `reads`, where
the batch has all of them, and gives the sum of the loss `term` (called as the head is unless it says otherwise), or a
dict of several terms;
without them it gives its predictions, if it `predicts`. Fields that it `may_read` are passed by keyword where the
batch has them, and `sequence`, the SequenceMetadata, to a head that `takes_sequence`."""


@HEADS.register("sentence")
class SentenceHead(nn.Module):
    """Classes of whole sequences, from the first token through a dense layer and tanh (Devlin et al. 2019).

    targets [B, T] hold the class at each sequence's first token and −100 elsewhere.
    """

    reads = ("sentence_targets",)
    predicts = True

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    cp_plan = "local"

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d, classes = initialiser(config), config.d_model, section.classes
        self.pooler = Linear(d, d, initial("dense", d, d), bias=True)
        self.classifier = Linear(d, classes, initial("dense", d, classes), bias=True)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Cost of one token of each row."""
        return default_cost(self, tokens.with_count(1))

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, C] of each row's first token, or, given targets, the summed cross-entropy."""
        if targets_BT is None:
            return self.classifier(self.pool(hidden_BTD[:, 0]))
        rows_M, columns_M = true_places(to_host(targets_BT) != IGNORE, targets_BT.device)
        logits_MC = self.classifier(self.pool(hidden_BTD[rows_M, columns_M]))
        precise = torch.promote_types(logits_MC.dtype, torch.float32)
        return F.cross_entropy(logits_MC.to(precise), targets_BT[rows_M, columns_M], reduction="sum")

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled vectors [..., D]."""
        return torch.tanh(self.pooler(hidden))


# B batch, T tokens, M masked tokens, D model width, P width of a position in a span

POSITION_WIDTH = 200
"""Width of the embedding of a token's place in its span (section 3.2 of the paper)."""
LONGEST_SPAN = 64
"""Tokens of a span that are distinguished; a span has at most 10 words."""


@HEADS.register("boundary")
class SpanBoundaryHead(nn.Module):
    """Two layers of dense, GELU and norm on [left boundary; right boundary; place in the span], then the vocabulary."""

    reads = ("targets", "span_left", "span_right")
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
            raise UsageError(
                "model.extra_heads.boundary predicts tokens: set model.embedding.name = 'tokens'"
            )
        initial, d, width = initialiser(config), config.d_model, config.embedding_width
        inner = 2 * d + POSITION_WIDTH
        self.around = SpanBoundaryGather()
        self.positions = Embedding(
            LONGEST_SPAN, POSITION_WIDTH, initial("position", LONGEST_SPAN, POSITION_WIDTH)
        )
        self.dense1 = Linear(inner, d, initial("dense", inner, d), bias=True)
        self.norm1 = make_norm(config, d)
        self.dense2 = Linear(d, width, initial("dense", d, width), bias=True)
        self.norm2 = make_norm(config, width)
        self.weight = tokens.weight
        self.bias = nn.Parameter(torch.empty(config.vocab_size or 0))
        self.initial = {"bias": Constant(0.0)}
        self.loss = CrossEntropy(LogitOptions())

    def cost(self, tokens: TokenCounts) -> Cost:
        """Cost of the masked tokens alone."""
        return default_cost(self, predicted_tokens(tokens))

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        left_BT: Tensor,
        right_BT: Tensor,
        row_left_BS: Tensor | None = None,
        row_right_BS: Tensor | None = None,
    ) -> Tensor:
        """The summed cross-entropy of masked tokens; left, right: distances to the tokens around the span, 0: none.
        row_left, row_right: of whole rows, where these are some of their tokens."""
        rows, columns = true_places(to_host(left_BT) > 0, left_BT.device)
        place_MP = self.positions((left_BT[rows, columns] - 1).clamp(max=LONGEST_SPAN - 1))
        around = self.around(hidden_BTD, left_BT, right_BT, row_left_BS, row_right_BS)
        inner_MD = self.norm1(F.gelu(self.dense1(torch.cat([*around, place_MP], dim=-1))))
        inner_ME = self.norm2(F.gelu(self.dense2(inner_MD)))
        return self.loss(inner_ME, self.weight, targets_BT[rows, columns], self.bias)


class SpanBoundaryGather(nn.Module):
    """The tokens around each span: the seam at which context parallelism takes over."""

    cp_plan = "span_boundary"

    def forward(
        self,
        hidden_BTD: Tensor,
        left_BT: Tensor,
        right_BT: Tensor,
        row_left_BS: Tensor | None,
        row_right_BS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [M, D] to the left and to the right of masked tokens' spans; of the row: see
        `SpanBoundaryHead`."""
        rows, columns = true_places(to_host(left_BT) > 0, left_BT.device)
        left_M, right_M = left_BT[rows, columns], right_BT[rows, columns]
        return hidden_BTD[rows, columns - left_M], hidden_BTD[rows, columns + right_M]
