"""Heads of downstream tasks: classes or numbers, told from tokens' hidden vectors."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.output_head import HEADS
from megatfm.ops import keyed_random as keyed
from megatfm.ops.cross_entropy import IGNORE

# B batch, T tokens, M tokens with a label, D model width, C classes

OnLogits = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Receives examples [M], words [M], logits [M, C] and targets [M] or [M, C] of a micro-batch in evaluation."""

DROPOUT_SITE = zlib.crc32(b"task head")


@HEADS.register("text_classifier")
class TextClassifier(nn.Module):
    """Logits [B, C] of one token of each row, or, given targets, the summed loss of all tokens with a label.

    targets: classes [B, T], −100 where there is none; with other losses numbers [B, T, C] at the tokens with a label,
    which `examples` tells: [B, T], the number of the example there, −1 elsewhere. words [B, T]: the number of the word
    in the example. A token's vector goes through BERT's pooler, a dense layer and tanh, unless `pooler` is "none".
    """

    reads = ("sentence_targets",)
    may_read = ("examples", "words", "keys", "token_indices")
    predicts = True
    term = "sentence"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    cp_plan = "local"

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d, classes = initialiser(config), config.d_model, section.classes
        self.layers = tuple(section.layers)
        _check_layers(config, self.layers)
        width, has_pooler = d * max(1, len(self.layers)), section.pooler == "tanh"
        self.pooler = Linear(width, d, initial("dense", width, d), bias=True) if has_pooler else None
        width = d if has_pooler else width
        self.classifier = Linear(width, classes, initial("dense", width, classes), bias=section.bias)
        self.dropout: float = section.dropout
        self.loss: str = section.loss
        self.token = 0 if section.token == "first" else -1
        self.on_logits: OnLogits | None = None
        """Set while an evaluation collects predictions."""

    def cost(self, tokens: TokenCounts) -> Cost:
        """Cost of one token of each row."""
        return default_cost(self, tokens.with_count(1))

    def forward(
        self,
        hidden_BTD: Tensor,
        targets: Tensor | None = None,
        *,
        examples: Tensor | None = None,
        words: Tensor | None = None,
        keys: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        if targets is None:
            return self.classifier(self.pool(hidden_BTD[:, self.token]))
        labelled_BT = targets != IGNORE if examples is None else examples >= 0
        rows_M, columns_M = labelled_BT.nonzero(as_tuple=True)
        pooled_MD, targets_M = self.pool(hidden_BTD[rows_M, columns_M]), targets[rows_M, columns_M]
        if self.training and self.dropout > 0 and keys is not None:
            at_M = columns_M if token_indices is None else token_indices[columns_M]
            keys_M = keyed.fold_in(keyed.fold_in(keys, DROPOUT_SITE)[rows_M], at_M)
            pooled_MD = keyed.dropout(pooled_MD, self.dropout, keys_M)
        logits_MC = self.classifier(pooled_MD)
        if self.on_logits is not None and examples is not None:
            numbers_M = columns_M * 0 if words is None else words[rows_M, columns_M]
            self.on_logits(examples[rows_M, columns_M], numbers_M, logits_MC, targets_M)
        return summed_loss(self.loss, logits_MC, targets_M)

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled vectors [..., D]."""
        return hidden if self.pooler is None else torch.tanh(self.pooler(hidden))


def _check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    """Raise a UsageError for layers that the model lacks, or a family that gives those of its stack to no head."""
    depth = config.encoder_layers if config.family == "encoder" else config.n_layers
    if layers and config.family not in ("encoder", "decoder"):
        raise UsageError(
            f"model.extra_heads: layers = {list(layers)} is for model.family = 'encoder' and 'decoder', not "
            f"{config.family!r}: leave layers out"
        )
    for number in layers:
        if not -depth - 1 <= number <= depth:
            raise UsageError(
                f"model.extra_heads: layers = {list(layers)}: the model has {depth} blocks, so that layers are 0 to "
                f"{depth}, or −1 to −{depth + 1} from the last: there is no {number}"
            )


def summed_loss(loss: str, logits_MC: Tensor, targets: Tensor) -> Tensor:
    """Sum of a loss over labelled tokens, each the mean over its classes, in float32 or more.

    targets: classes [M] of cross-entropy, numbers [M, C] of the others.
    """
    precise_MC = logits_MC.to(torch.promote_types(logits_MC.dtype, torch.float32))
    if loss == "cross_entropy":
        return F.cross_entropy(precise_MC, targets, reduction="sum")
    numbers_MC, classes = targets.to(precise_MC.dtype), logits_MC.shape[-1]
    if loss == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(precise_MC, numbers_MC, reduction="sum") / classes
    return F.mse_loss(precise_MC, numbers_MC, reduction="sum") / classes
