"""Heads of downstream tasks: classes or numbers, from tokens' hidden vectors."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.dropout import require_rng_keys
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import keyed_random as keyed
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.transfer import find_true_indices, to_host

# B batch, T tokens, S tokens of full rows, N tokens with a score, M examples or tokens with a label, D model width, C
# classes

OnLogits = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Receives examples [M], words [M], logits [M, C] and targets [M] or [M, C] of a micro-batch in evaluation. If an
example chooses among candidates, words are their indices (choices or tokens), and targets mark the right ones."""

DROPOUT_SITE = zlib.crc32(b"task head")


class RowScores(nn.Module):
    """Scores of the tokens of full rows. Context parallelism sums them over the ranks that share a row."""

    cp_plan = "all_reduce"

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(self, scores_BTC: Tensor, row_length: int, token_indices: Tensor | None) -> Tensor:
        """Return scores [B, S, C] of full rows. token_indices [T]: indices of the T tokens in them; None: T = S."""
        if token_indices is None:
            return scores_BTC
        empty_BSC = scores_BTC.new_zeros(len(scores_BTC), row_length, scores_BTC.shape[-1])
        full_BSC: Tensor = self.all_reduce(empty_BSC.index_copy(1, token_indices, scores_BTC))
        return full_BSC


class TaskHead(nn.Module):
    """A linear layer on tokens' vectors, after the pooler that the section names (`config.heads.PoolerName`)."""

    cp_plan = "local"

    def __init__(self, config: ModelConfig, section: Any, classes: int) -> None:
        super().__init__()
        initial, d = make_initialiser(config), config.d_model
        self.layers = tuple(getattr(section, "layers", ()))
        _check_layers(config, self.layers)
        width, kind = d * max(1, len(self.layers)), getattr(section, "pooler", "none")
        self.pooler: Linear | None = None
        self.pooler_norm: nn.Module | None = make_norm(config, d) if kind == "transform" else None
        if kind != "none":
            self.pooler = Linear(width, d, initial("dense", width, d), bias=section.pooler_bias)
            width = d
        name = config.ffn.activation if kind in ("activation", "transform") else kind
        self.activation = torch.tanh if kind in ("tanh", "none") else ACTIVATIONS.get(name).function
        self.classifier = Linear(width, classes, initial("dense", width, classes), bias=section.bias)
        self.dropout: float = section.dropout
        columns: dict[str, int | slice[None, None, None]] = {"first": 0, "last": -1, "all": slice(None)}
        self.token = columns[getattr(section, "token", "first")]
        self.on_logits: OnLogits | None = None
        """Set while an evaluation collects predictions."""

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of one token of each row."""
        return default_cost(self, tokens.with_count(1))

    def pool(self, hidden: Tensor) -> Tensor:
        """Return the pooled vectors [..., D]."""
        if self.pooler is None:
            return hidden
        pooled: Tensor = self.activation(self.pooler(hidden))
        return pooled if self.pooler_norm is None else self.pooler_norm(pooled)

    def pool_at(
        self, hidden_BTD: Tensor, rows_M: Tensor, columns_M: Tensor, keys: Tensor | None, indices: Tensor | None
    ) -> Tensor:
        """Return the pooled vectors [M, D] of some tokens; dropout in training depends on their positions in rows.

        Raises UsageError for dropout without random keys.
        """
        pooled_MD = self.pool(hidden_BTD[rows_M, columns_M])
        if self.training and self.dropout > 0:
            token_M = columns_M if indices is None else indices[columns_M]
            keys_B = keyed.fold_in(require_rng_keys(keys, "dropout before the classifier"), DROPOUT_SITE)
            keys_M = keyed.fold_in(keys_B[rows_M], token_M)
            pooled_MD = keyed.dropout(pooled_MD, self.dropout, keys_M)
        return pooled_MD


def _require_field(field_BT: Tensor | None, name: str) -> Tensor:
    """Return a field that a head reads beside its targets. Raises TypeError for a batch without it."""
    if field_BT is None:
        raise TypeError(f"the targets of a head come with the field {name!r}, and the batch has none: give it, too")
    return field_BT


@HEADS.register("text_classifier")
class TextClassifier(TaskHead):
    """Logits of one token of each row [B, C] or of all [B, T, C], or, given targets, the summed loss of all labels.

    targets: classes [B, T], −100 where there is none; for other losses values [B, T, C]. examples [B, T]: the index of
    the example at a token with a label, −1 elsewhere. words [B, T]: the index of the word in the example. With
    `both_orders` each example has two such tokens, where `parts` [B, T] is 0 and 1; their logits are added, and the
    label is that of the first.
    """

    input_fields = ("sentence_targets",)
    full_row_fields = ("examples",)
    optional_fields = ("examples", "parts", "words", "keys", "token_indices")
    predicts = True
    term = "sentence"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__(config, section, section.classes)
        self.loss: str = section.loss
        # No buffer, since it is no part of a checkpoint.
        self.class_weights_C = torch.from_numpy(np.array(section.class_weights))
        self.row_scores = RowScores() if section.both_orders else None

    def forward(
        self,
        hidden_BTD: Tensor,
        targets: Tensor | None = None,
        full_examples: Tensor | None = None,
        *,
        examples: Tensor | None = None,
        parts: Tensor | None = None,
        words: Tensor | None = None,
        keys: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        if targets is None:
            return self.classifier(self.pool(hidden_BTD[:, self.token]))
        labelled_BT = to_host(targets) != IGNORE if examples is None else to_host(examples) >= 0
        rows_M, columns_M = find_true_indices(labelled_BT, hidden_BTD.device)
        pooled_MD = self.pool_at(hidden_BTD, rows_M, columns_M, keys, token_indices)
        if self.row_scores is None:
            logits_MC = self.classifier(pooled_MD)
        else:
            examples, parts = _require_field(examples, "examples"), _require_field(parts, "parts")
            scores_MC = F.linear(pooled_MD, self.classifier.compute_matrix())
            scores_BTC = scores_MC.new_zeros(*examples.shape, scores_MC.shape[-1])
            scores_BTC = scores_BTC.index_put((rows_M, columns_M), scores_MC)
            rows_M, columns_M = find_true_indices(labelled_BT & (to_host(parts) == 0), hidden_BTD.device)
            row_examples = examples if full_examples is None else full_examples
            scores_BSC = self.row_scores(scores_BTC, row_examples.shape[1], token_indices)
            logits_MC = self._add_both_orders(scores_BSC[rows_M], row_examples[rows_M], examples[rows_M, columns_M])
        targets_M = targets[rows_M, columns_M]
        if self.on_logits is not None and examples is not None:
            words_M = columns_M * 0 if words is None else words[rows_M, columns_M]
            self.on_logits(examples[rows_M, columns_M], words_M, logits_MC, targets_M)
        self.class_weights_C = self.class_weights_C.to(logits_MC.device)
        return compute_summed_loss(self.loss, logits_MC, targets_M, self.class_weights_C)

    def _add_both_orders(self, scores_MSC: Tensor, row_examples_MS: Tensor, examples_M: Tensor) -> Tensor:
        """Return logits [M, C]: the scores of both tokens of each example in its row, added, plus the bias."""
        in_example_MS = (row_examples_MS == examples_M[:, None]).to(scores_MSC.dtype)
        logits_MC = torch.einsum("ms,msc->mc", in_example_MS, scores_MSC)
        return logits_MC if self.classifier.bias is None else logits_MC + self.classifier.bias


@HEADS.register("multiple_choice")
class MultipleChoiceHead(TaskHead):
    """Scores [B, 1] of one token of each row, or, given targets, the summed cross-entropy of the right choices.

    An example has a text for each choice, and one token of each text carries its score: there, `examples` [B, T] is the
    index of the example (−1 elsewhere) and `parts` that of the choice. targets [B, T]: the index of the right choice at
    the first of these tokens, −100 elsewhere. Examples may have different numbers of choices.
    """

    input_fields = ("choice_targets",)
    full_row_fields = ("examples", "parts")
    optional_fields = ("examples", "parts", "keys", "token_indices")
    predicts = True
    term = "choice"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__(config, section, 1)
        self.row_scores = RowScores()

    def forward(
        self,
        hidden_BTD: Tensor,
        targets: Tensor | None = None,
        full_examples: Tensor | None = None,
        full_parts: Tensor | None = None,
        *,
        examples: Tensor | None = None,
        parts: Tensor | None = None,
        keys: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        if targets is None:
            return self.classifier(self.pool(hidden_BTD[:, self.token]))
        examples, parts = _require_field(examples, "examples"), _require_field(parts, "parts")
        rows_N, columns_N = find_true_indices(to_host(examples) >= 0, hidden_BTD.device)
        scores_N1 = self.classifier(self.pool_at(hidden_BTD, rows_N, columns_N, keys, token_indices))
        scores_BT1 = scores_N1.new_zeros(*examples.shape, 1).index_put((rows_N, columns_N), scores_N1)
        row_examples = examples if full_examples is None else full_examples
        row_parts = parts if full_parts is None else full_parts
        scores_BS1 = self.row_scores(scores_BT1, row_examples.shape[1], token_indices)
        rows_M, columns_M = find_true_indices(to_host(targets) != IGNORE, hidden_BTD.device)
        choices_MS = row_examples[rows_M] == examples[rows_M, columns_M][:, None]
        is_correct_MS = choices_MS & (row_parts[rows_M] == targets[rows_M, columns_M][:, None])
        if self.on_logits is not None:
            _report_candidates(self.on_logits, scores_BS1[rows_M], choices_MS, examples[rows_M, columns_M],
                  row_parts[rows_M], is_correct_MS.long())  # fmt: skip
        return compute_pointer_loss(scores_BS1[rows_M, :, 0], choices_MS, is_correct_MS.long().argmax(1))


@HEADS.register("span_extraction")
class SpanExtractionHead(TaskHead):
    """Logits [B, T, 2] that an answer begins and ends at a token, or, given targets, their summed cross-entropy, the
    mean of both, over the tokens of each text.

    marks [B, T]: 1 at the first token of a text's answer, 2 at its last, 3 at both in one, 0 elsewhere; the text's own
    first token has 3 where it has no answer. examples [B, T]: the text's index at its first token, −1 elsewhere.
    """

    input_fields = ("answer_marks",)
    full_row_fields = ("answer_marks",)
    optional_fields = ("examples", "keys", "token_indices")
    takes_sequence = True
    predicts = True
    term = "answer_span"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__(config, section, 2)
        self.row_scores = RowScores()

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of all tokens."""
        return default_cost(self, tokens)

    def forward(
        self,
        hidden_BTD: Tensor,
        marks: Tensor | None = None,
        full_marks: Tensor | None = None,
        *,
        sequence: SequenceMetadata | None,
        examples: Tensor | None = None,
        keys: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        if marks is None:
            return self.classifier(self.pool(hidden_BTD))
        if sequence is None:
            raise MegatfmError("the head 'span_extraction' needs the sequence: a family passes it to Model.output")
        examples = _require_field(examples, "examples")
        row_B, column_T = (torch.arange(n, device=marks.device) for n in marks.shape)
        rows_N, columns_N = torch.cartesian_prod(row_B, column_T).unbind(1)
        scores_NC = self.classifier(self.pool_at(hidden_BTD, rows_N, columns_N, keys, token_indices))
        row_marks = marks if full_marks is None else full_marks
        scores_BSC = self.row_scores(scores_NC.view(*marks.shape, 2), row_marks.shape[1], token_indices)
        row_documents = sequence.full_sequence.documents_or_zeros
        rows_M, columns_M = find_true_indices(to_host(examples) >= 0, hidden_BTD.device)
        first_M = columns_M if token_indices is None else token_indices[columns_M]
        text_MS = row_documents[rows_M] == row_documents[rows_M, first_M][:, None]
        marks_MS = row_marks[rows_M].where(text_MS, 0)
        if self.on_logits is not None:
            positions_MS = torch.arange(text_MS.shape[1], device=text_MS.device) - first_M[:, None]
            _report_candidates(
                self.on_logits, scores_BSC[rows_M], text_MS, examples[rows_M, columns_M], positions_MS, marks_MS
            )
        losses = (
            compute_pointer_loss(scores_BSC[rows_M, :, side], text_MS, (marks_MS & mark > 0).long().argmax(1))
            for side, mark in enumerate((1, 2))
        )
        return torch.stack([*losses]).mean()


def _report_candidates(
    on_logits: OnLogits, scores_MSC: Tensor, candidates_MS: Tensor, examples_M: Tensor, indices_MS: Tensor,
    marks_MS: Tensor,
) -> None:  # fmt: skip
    """Pass on the scores of all candidates (choices, or tokens of a text), with their indices and marks."""
    examples_MS = examples_M[:, None].expand_as(candidates_MS)
    on_logits(*(x[candidates_MS] for x in (examples_MS, indices_MS, scores_MSC, marks_MS)))


def compute_pointer_loss(scores_MS: Tensor, candidates_MS: Tensor, targets_M: Tensor) -> Tensor:
    """Return the summed cross-entropy of choosing column `targets` among each row's candidates, in float32 at least."""
    precise_MS = scores_MS.to(torch.promote_types(scores_MS.dtype, torch.float32))
    masked_MS = precise_MS.masked_fill(~candidates_MS, torch.finfo(precise_MS.dtype).min)
    return F.cross_entropy(masked_MS, targets_M, reduction="sum")


def _check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    """Raise a UsageError for layers that the model lacks, or a family whose heads get no layers."""
    depth = config.encoder_layers if config.family == "encoder" else config.n_layers
    if layers and config.family not in ("encoder", "decoder"):
        raise UsageError(
            f"model.extra_heads: layers = {list(layers)} is for model.family = 'encoder' and 'decoder', not "
            f"{config.family!r}: leave layers out"
        )
    for layer in layers:
        if not -depth - 1 <= layer <= depth:
            raise UsageError(
                f"model.extra_heads: layers = {list(layers)}: the model has {depth} blocks, so that layers are 0 to "
                f"{depth}, or −1 to −{depth + 1} from the last: there is no {layer}"
            )


def compute_summed_loss(loss: str, logits_MC: Tensor, targets: Tensor, class_weights_C: Tensor | None = None) -> Tensor:
    """Return the sum of a loss over labelled tokens, each the mean over its classes, in float32 at least.

    targets: classes [M] for cross-entropy, values [M, C] for the others. class_weights_C: of cross-entropy; None or
    empty: 1.
    """
    precise_MC = logits_MC.to(torch.promote_types(logits_MC.dtype, torch.float32))
    if loss == "cross_entropy":
        weights_C = None
        if class_weights_C is not None and len(class_weights_C):
            weights_C = class_weights_C.to(precise_MC.dtype)
        return F.cross_entropy(precise_MC, targets, weights_C, reduction="sum")
    values_MC, classes = targets.to(precise_MC.dtype), logits_MC.shape[-1]
    if loss == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(precise_MC, values_MC, reduction="sum") / classes
    return F.mse_loss(precise_MC, values_MC, reduction="sum") / classes
