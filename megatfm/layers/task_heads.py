"""Heads of downstream tasks: classes, told from one token's hidden vector for each example."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.output_head import HEADS
from megatfm.ops import keyed_random as keyed
from megatfm.ops.cross_entropy import IGNORE

# B batch, T tokens, M tokens that stand for an example, D model width, C classes

OnLogits = Callable[[Tensor, Tensor, Tensor], None]
"""Receives examples [M], logits [M, C] and targets [M] of a micro-batch in evaluation."""

DROPOUT_SITE = zlib.crc32(b"task head")


@HEADS.register("sequence_classifier")
class SequenceClassifier(nn.Module):
    """Logits [B, C] of each row's first token, or, given targets, the summed cross-entropy of the examples.

    targets [B, T] hold an example's class at the token that stands for it (its first in an encoder), and −100
    elsewhere; examples [B, T] its number there. The token's vector goes through BERT's pooler, a dense layer and tanh,
    unless `pooler` is "none".
    """

    reads = ("sentence_targets",)
    may_read = ("examples", "keys", "token_indices")
    predicts = True
    term = "sentence"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    cp_plan = "local"

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d, classes = initialiser(config), config.d_model, section.classes
        self.pooler = Linear(d, d, initial("dense", d, d), bias=True) if section.pooler == "tanh" else None
        self.classifier = Linear(d, classes, initial("dense", d, classes), bias=section.bias)
        self.dropout: float = section.dropout
        self.on_logits: OnLogits | None = None
        """Set while an evaluation collects predictions."""

    def cost(self, tokens: TokenCounts) -> Cost:
        """Cost of one token of each row."""
        return default_cost(self, tokens.with_count(1))

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None = None,
        *,
        examples: Tensor | None = None,
        keys: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        if targets_BT is None:
            return self.classifier(self.pool(hidden_BTD[:, 0]))
        rows_M, columns_M = (targets_BT != IGNORE).nonzero(as_tuple=True)
        pooled_MD, targets_M = self.pool(hidden_BTD[rows_M, columns_M]), targets_BT[rows_M, columns_M]
        if self.training and self.dropout > 0 and keys is not None:
            at_M = columns_M if token_indices is None else token_indices[columns_M]
            keys_M = keyed.fold_in(keyed.fold_in(keys, DROPOUT_SITE)[rows_M], at_M)
            pooled_MD = keyed.dropout(pooled_MD, self.dropout, keys_M, 0)
        logits_MC = self.classifier(pooled_MD)
        if self.on_logits is not None and examples is not None:
            self.on_logits(examples[rows_M, columns_M], logits_MC, targets_M)
        precise = torch.promote_types(logits_MC.dtype, torch.float32)
        return F.cross_entropy(logits_MC.to(precise), targets_M, reduction="sum")

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled vectors [..., D]."""
        return hidden if self.pooler is None else torch.tanh(self.pooler(hidden))
