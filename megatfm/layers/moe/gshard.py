"""The best expert, and by chance the second best (Lepikhin et al. 2021, algorithm 1)."""

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import dropout as keyed


class SecondExpertSampling(Dropout):
    """Boolean [B, T]: whether a token goes to its second expert; in training by chance, twice as likely as its weight.

    Keyed as dropout is, so that every layout draws the same.
    """

    def forward(self, weights_BT: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.training:
            return weights_BT > 0
        return 2 * weights_BT > keyed.uniform(self.token_rng_keys(sequence), 1)[..., 0]


@ROUTERS.register("gshard")
class GShardRouter(Router):
    """Weights are the two probabilities, made to add up to 1 whether or not the second expert is gone to."""

    tp_plan = (("second", "keys of own tokens"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.n_experts = require_variant(config.ffn, MoEConfig, "model.ffn").n_experts
        self.second = SecondExpertSampling(0.0, "second expert")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        shares_BTE = logits_BTE.softmax(-1)
        choices_BT2 = stable_topk(shares_BTE, 2)
        weights_BT2 = shares_BTE.gather(-1, choices_BT2)
        weights_BT2 = weights_BT2 / weights_BT2.sum(-1, keepdim=True)
        uses_second_BT = self.second(weights_BT2[..., 1].detach(), sequence)
        second_BT = choices_BT2[..., 1].where(uses_second_BT, self.n_experts)
        choices_BT2 = torch.stack([choices_BT2[..., 0], second_BT], dim=-1)
        return RouterOutput(choices_BT2, weights_BT2.to(x_BTD.dtype), logits_BTE, shares_BTE)
