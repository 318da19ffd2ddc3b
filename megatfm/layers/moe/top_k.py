"""The experts with the highest softmax (Shazeer et al. 2017, equations 3 to 5, without noise)."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig, TopKRouterConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.initial import Constant


@ROUTERS.register("top_k")
class TopKRouter(Router):
    """Weights are the probabilities of the chosen, normalised among them (Mixtral, Qwen3) or as they are (OLMoE)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        router = require_variant(options.router, TopKRouterConfig, "model.ffn.router")
        self.normalise = router.norm_topk_prob
        self.bias = nn.Parameter(torch.empty(options.n_experts)) if router.bias else None
        if router.bias:
            self.initial["bias"] = Constant(0.0)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias
        shares_BTE = logits_BTE.softmax(-1)
        choices_BTK = stable_topk(shares_BTE, self.top_k)
        weights_BTK = shares_BTE.gather(-1, choices_BTK)
        if self.normalise:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        return RouterOutput(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, shares_BTE)
