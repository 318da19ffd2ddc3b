"""SpanBERT's span boundary objective (Joshi et al. 2020, section 2.2): a span's tokens from the two around it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost
from megatfm.errors import UsageError
from megatfm.layers.head import HEADS, CrossEntropy, predicted_tokens
from megatfm.layers.initialisation import initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.table import Embedding
from megatfm.ops.cross_entropy import LogitOptions
from megatfm.ops.initial import Constant

# B batch, T tokens, M masked tokens, D model width, P width of a position in a span

POSITION_WIDTH = 200
"""Width of the embedding of a token's place in its span (section 3.2 of the paper)."""
LONGEST_SPAN = 64
"""Tokens of a span that are told apart; a span has at most 10 words."""


@HEADS.register("boundary")
class SpanBoundaryHead(nn.Module):
    """Two layers of dense, GELU and norm on [left boundary; right boundary; place in the span], then the vocabulary."""

    reads = ("targets", "span_left", "span_right")
    full_row_fields = ("span_left", "span_right")
    cp_plan = "alone"
    predicts = False

    tp_plan = (
        ("", "vocabulary head"),
        ("positions", "shared by heads"),
        ("dense[12]", "shared by heads"),
        ("norm[12]", "shared by heads"),
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
        """Of masked tokens alone."""
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
        rows, columns = (left_BT > 0).nonzero(as_tuple=True)
        place_MP = self.positions((left_BT[rows, columns] - 1).clamp(max=LONGEST_SPAN - 1))
        around = self.around(hidden_BTD, left_BT, right_BT, row_left_BS, row_right_BS)
        inner_MD = self.norm1(F.gelu(self.dense1(torch.cat([*around, place_MP], dim=-1))))
        inner_ME = self.norm2(F.gelu(self.dense2(inner_MD)))
        return self.loss(inner_ME, self.weight, targets_BT[rows, columns], self.bias)


class SpanBoundaryGather(nn.Module):
    """The tokens around each span: the seam at which context parallelism takes over."""

    cp_plan = "around"

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
        rows, columns = (left_BT > 0).nonzero(as_tuple=True)
        left_M, right_M = left_BT[rows, columns], right_BT[rows, columns]
        return hidden_BTD[rows, columns - left_M], hidden_BTD[rows, columns + right_M]
