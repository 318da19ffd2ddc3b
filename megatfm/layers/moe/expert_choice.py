"""Experts choose tokens (Zhou et al. 2022, section 3.2): even by construction, and for encoders alone.

What a token gets depends on those after it.
"""

import math

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, expect
from megatfm.config.experts import MoEConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, Routing, highest
from megatfm.layers.sequence import SequenceMetadata


@ROUTERS.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert takes those ⌈top_k · T / experts⌉ tokens of a row that are most probably its own; `top_k` is what a
    token has on average, and it may have none or all. Weights are the probabilities."""

    plan = (("whole", "sequence, gathered"), ("own", "sequence output"))

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.n_experts = expect(config.ffn, MoEConfig, "model.ffn").n_experts
        # Where ranks that have a part of a row each get all of it, and keep their own.
        self.whole, self.own = nn.Identity(), nn.Identity()

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Routing:
        logits_BTE = self.logits(x_BTD)
        shares_BTE = logits_BTE.softmax(-1)
        of_row_BTE = self._taken(self.whole(shares_BTE.detach()), sequence.real)
        taken_BTE = self.own(of_row_BTE)
        # Those who chose a token first, and as many columns as the token with most has, on every rank.
        order_BTE = highest(taken_BTE.to(torch.int8), self.n_experts)
        width = max(int(of_row_BTE.sum(-1).max()), 1)
        choices_BTK = order_BTE[..., :width]
        weights_BTK = shares_BTE.gather(-1, choices_BTK)
        choices_BTK = choices_BTK.where(taken_BTE.gather(-1, choices_BTK), self.n_experts)
        return Routing(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, shares_BTE)

    def _taken(self, shares_BTE: Tensor, real_BT: Tensor) -> Tensor:
        T = shares_BTE.shape[1]
        places = min(math.ceil(self.top_k * T / self.n_experts), T)
        scores_BET = shares_BTE.masked_fill(~real_BT[..., None], -1).transpose(1, 2)
        taken_BET = torch.zeros_like(scores_BET, dtype=torch.bool)
        taken_BET.scatter_(-1, highest(scores_BET, places), True)
        return taken_BET.transpose(1, 2) & real_BT[..., None]
