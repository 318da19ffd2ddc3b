"""Sigmoid scores, chosen with a bias that evens the load out, from the best groups (DeepSeek-AI 2024, section 2.1)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import DeepSeekV3RouterConfig, MoEConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.initial import Constant

# G groups


@ROUTERS.register("deepseek_v3")
class DeepSeekV3Router(Router):
    """The bias has a say in the choice alone: weights are scores. After each step it rises where less was chosen than
    the mean, and falls where more was, without a loss (Wang et al. 2024)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.options = require_variant(options.router, DeepSeekV3RouterConfig, "model.ffn.router")
        self.register_buffer("bias", torch.empty(options.n_experts), persistent=True)
        self.bias: Tensor
        self.initial |= {"bias": Constant(0.0)}

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        scores_BTE = logits_BTE.sigmoid()
        choices_BTK = stable_topk(self._in_best_groups(scores_BTE.detach() + self.bias), self.top_k)
        weights_BTK = scores_BTE.gather(-1, choices_BTK)
        if self.options.norm_topk_prob:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        weights_BTK = (weights_BTK * self.options.routed_scaling_factor).to(x_BTD.dtype)
        return RouterOutput(choices_BTK, weights_BTK, logits_BTE, probabilities_BTE)

    def _in_best_groups(self, scores_BTE: Tensor) -> Tensor:
        """Without the experts of all but the groups whose two best scores together are highest."""
        n, best = self.options.n_group, self.options.topk_group
        if best == n:
            return scores_BTE
        grouped_BTGx = scores_BTE.unflatten(-1, (n, -1))
        ranks_BTG = grouped_BTGx.sort(-1, descending=True).values[..., :2].sum(-1)
        allowed_BTG = torch.zeros_like(ranks_BTG, dtype=torch.bool)
        allowed_BTG.scatter_(-1, stable_topk(ranks_BTG, best), True)
        return grouped_BTGx.masked_fill(~allowed_BTG[..., None], float("-inf")).flatten(-2)

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        load_E = load_E.to(self.bias.dtype)
        self.bias += self.options.bias_update_rate * (load_E.mean() - load_E).sign()
