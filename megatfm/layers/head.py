"""Hidden vectors to logits, or to a loss without ever holding all logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.initialisation import Initialiser, initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.table import Embedding
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy
from megatfm.ops.initial import Constant
from megatfm.ops.moved import moved, to_host
from megatfm.registry import Registry

# B batch, T tokens, M tokens that count, D model width, E embedding width, V vocabulary, C classes


DEFAULT_MASKED_FRACTION = 0.15
"""Of tokens that are masked, as objectives have it unless told otherwise: these alone go through a sparse head."""


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
        self, hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, bias_V: Tensor | None
    ) -> Tensor:
        variant = self.variant if self.training else replace(self.variant, smoothing=0.0)
        return cross_entropy(hidden_ME, weight_VE, targets_M, bias_V, variant)


class PredictionHeadTransform(nn.Module):
    """BERT's dense layer, activation and norm before the output matrix, from D to E."""

    tp_plan = (("dense", "shared by heads"), ("norm", "shared by heads"))

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

    where [B, T]: logits [M, V] of these tokens alone.

    Where few tokens have a target, as in masked language models, only those go through.
    """

    tp_plan = (("", "vocabulary head"),)

    cp_plan = "alone"

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

    def cost(self, tokens: TokenCounts) -> Cost:
        """Its matrix, though shared with a table, is multiplied with the tokens that have a target."""
        return default_cost(self, predicted_tokens(tokens) if self.sparse else tokens)

    def forward(
        self, hidden_BTD: Tensor, targets_BT: Tensor | None = None, *, token_mask_BT: Tensor | None = None
    ) -> Tensor:
        if targets_BT is None:
            hidden = hidden_BTD if token_mask_BT is None else hidden_BTD[token_mask_BT]
            logits = F.linear(self._last(hidden), self.weight, self.bias)
            return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        hidden_MD, targets_M = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        if self.sparse:
            # By places that the host finds, since it has to know how many they are.
            at_M = moved((to_host(targets_BT).flatten() != IGNORE).nonzero()[:, 0], targets_M.device)
            hidden_MD, targets_M = hidden_MD[at_M], targets_M[at_M]
        return self.loss(self._last(hidden_MD), self.weight, targets_M, self.bias)

    def _last(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.transform is None else self.transform(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale


HEADS: Registry[Callable[[ModelConfig, Any, Embedding | None], nn.Module]] = Registry(
    "head (model.extra_heads)"
)
"""Heads besides the one over the vocabulary. Made as `head(config, section, tokens)`: tokens is the table of tokens, if
there is one. A head is a module that takes hidden vectors [B, T, D] and the fields of the batch that it `reads`, where
the batch has all of them, and gives the sum of the loss `term` (called as the head is unless it says otherwise);
without them it gives what it predicts, if it `predicts`."""


@HEADS.register("sentence")
class SentenceHead(nn.Module):
    """Classes of whole sequences, from the first token through a dense layer and tanh (Devlin et al. 2019).

    targets [B, T] hold the class at each sequence's first token and −100 elsewhere.
    """

    reads = ("sentence_targets",)
    predicts = True

    tp_plan = (("", "whole input"), ("*", "whole"))

    cp_plan = "alone"

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        initial, d, classes = initialiser(config), config.d_model, section.classes
        self.pooler = Linear(d, d, initial("dense", d, d), bias=True)
        self.classifier = Linear(d, classes, initial("dense", d, classes), bias=True)

    def cost(self, tokens: TokenCounts) -> Cost:
        """Of one token of the row."""
        return default_cost(self, tokens.with_count(1))

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, C] of each row's first token, or, given targets, the summed cross-entropy."""
        if targets_BT is None:
            return self.classifier(self.pool(hidden_BTD[:, 0]))
        counted = targets_BT != IGNORE
        logits_MC = self.classifier(self.pool(hidden_BTD[counted]))
        precise = torch.promote_types(logits_MC.dtype, torch.float32)
        return F.cross_entropy(logits_MC.to(precise), targets_BT[counted], reduction="sum")

    def pool(self, hidden: Tensor) -> Tensor:
        """The pooled vectors [..., D]."""
        return torch.tanh(self.pooler(hidden))
