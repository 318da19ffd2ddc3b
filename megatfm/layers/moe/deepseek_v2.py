"""The highest softmax, from the best groups (DeepSeek-AI 2024a, section 2.2.2, device-limited routing)."""

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import DeepSeekV2RouterConfig, MoEConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata

# G groups


@ROUTERS.register("deepseek_v2")
class DeepSeekV2Router(Router):
    """Weights are the probabilities times `scale`, as they are. A group is as good as its best expert."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.options = require_variant(options.router, DeepSeekV2RouterConfig, "model.ffn.router")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        shares_BTE = logits_BTE.softmax(-1)
        n, best = self.options.n_group, self.options.topk_group
        scores_BTGx = shares_BTE.detach().unflatten(-1, (n, -1))
        groups_BTG = stable_topk(scores_BTGx.max(-1).values, best)
        allowed_BTG = torch.zeros(scores_BTGx.shape[:-1], dtype=torch.bool, device=x_BTD.device)
        allowed_BTG.scatter_(-1, groups_BTG, True)
        scores_BTE = scores_BTGx.masked_fill(~allowed_BTG[..., None], -1).flatten(-2)
        choices_BTK = stable_topk(scores_BTE, self.top_k)
        weights_BTK = (shares_BTE.gather(-1, choices_BTK) * self.options.routed_scaling_factor).to(
            x_BTD.dtype
        )
        return RouterOutput(choices_BTK, weights_BTK, logits_BTE, shares_BTE)
