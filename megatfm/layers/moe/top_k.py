"""The experts with the highest softmax (Shazeer et al. 2017, equations 3 to 5, without noise)."""

from torch import Tensor

from megatfm.config import ModelConfig, expect
from megatfm.config.experts import MoEConfig, TopKRouterConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, Routing, highest
from megatfm.layers.sequence import SequenceMetadata


@ROUTERS.register("top_k")
class TopKRouter(Router):
    """Weights are the probabilities of the chosen, normalised among them (Mixtral, Qwen3) or as they are (OLMoE)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = expect(config.ffn, MoEConfig, "model.ffn")
        self.normalise = expect(options.router, TopKRouterConfig, "model.ffn.router").normalise

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Routing:
        logits_BTE = self.logits(x_BTD)
        shares_BTE = logits_BTE.softmax(-1)
        choices_BTK = highest(shares_BTE, self.top_k)
        weights_BTK = shares_BTE.gather(-1, choices_BTK)
        if self.normalise:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        return Routing(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, shares_BTE)
