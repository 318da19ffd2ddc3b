"""Tokens to vectors, and vectors to the loss or to logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.cross_entropy import cross_entropy
from megatfm.ops.initial import Normal

# B batch, T tokens, D model width, V vocabulary


class TokenEmbedding(nn.Module):
    """Rows of a [V, D] table."""

    def __init__(self, vocab_size: int, d_model: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.initial = {"weight": Normal(std)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class CrossEntropy(nn.Module):
    """The summed loss of hidden vectors: the seam at which a vocabulary-parallel loss takes over."""

    def forward(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())


class Head(nn.Module):
    """Logits [B, T, V] of hidden vectors, or, given targets, the summed loss without ever holding all logits."""

    def __init__(self, d_model: int, vocab_size: int, std: float, tied_to: TokenEmbedding | None) -> None:
        super().__init__()
        self.weight = tied_to.weight if tied_to else nn.Parameter(torch.empty(vocab_size, d_model))
        self.initial = {} if tied_to else {"weight": Normal(std)}
        self.loss = CrossEntropy()

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return F.linear(hidden_BTD, self.weight)
        return self.loss(hidden_BTD, self.weight, targets_BT)
