"""Experts choose tokens (Zhou et al. 2022, section 3.2): even by construction, and for encoders alone.

What a token gets depends on those after it.
"""

import math

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, RowSeam, stable_topk
from megatfm.layers.sequence import SequenceMetadata


@ROUTERS.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert takes those ⌈top_k · T / experts⌉ tokens of a row that are most probably its own; `top_k` is what a
    token has on average, and it may have none or all. Weights are the probabilities."""

    tp_plan = (("whole", "sequence, gathered"), ("own", "sequence output"))

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.n_experts = require_variant(config.ffn, MoEConfig, "model.ffn").n_experts
        # Where ranks that have a part of a row each get all of it, and keep their own.
        self.whole, self.own = nn.Identity(), nn.Identity()
        # The same where ranks cut rows for attention, too.
        self.row, self.part = RowSeam(), RowSeam()

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        shares_BTE = logits_BTE.softmax(-1)
        of_row_BSE = self.row(self.whole(shares_BTE.detach()), sequence)
        of_row_BSE = self._taken(of_row_BSE, sequence.full_non_padding_mask)
        taken_BTE = self.own(self.part(of_row_BSE, sequence))
        # Those who chose a token first, and as many columns as the token with most has, on every rank.
        order_BTE = stable_topk(taken_BTE.to(torch.int8), self.n_experts)
        width = max(int(of_row_BSE.sum(-1).max()), 1)
        choices_BTK = order_BTE[..., :width]
        weights_BTK = shares_BTE.gather(-1, choices_BTK)
        choices_BTK = choices_BTK.where(taken_BTE.gather(-1, choices_BTK), self.n_experts)
        return RouterOutput(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, shares_BTE)

    def _taken(self, shares_BSE: Tensor, real_BS: Tensor) -> Tensor:
        S = shares_BSE.shape[1]
        places = min(math.ceil(self.top_k * S / self.n_experts), S)
        scores_BES = shares_BSE.masked_fill(~real_BS[..., None], -1).transpose(1, 2)
        taken_BES = torch.zeros_like(scores_BES, dtype=torch.bool)
        taken_BES.scatter_(-1, stable_topk(scores_BES, places), True)
        return taken_BES.transpose(1, 2) & real_BS[..., None]
