"""The one most probable expert (Fedus et al. 2022, section 2.1, and 2.4 for the jitter)."""

from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig, SwitchRouterConfig
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import dropout as keyed


class Jitter(Dropout):
    """Multiplies by numbers in [1 − rate, 1 + rate] in training, keyed as dropout is."""

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.active:
            return x_BTD
        draws_BTD = keyed.uniform(self.token_rng_keys(sequence), x_BTD.shape[-1])
        return x_BTD * (1 + self.rate * (2 * draws_BTD - 1)).to(x_BTD.dtype)


@ROUTERS.register("switch")
class SwitchRouter(Router):
    """Its weight is its probability."""

    tp_plan = (("jitter", "keys of own tokens"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        jitter = require_variant(options.router, SwitchRouterConfig, "model.ffn.router").jitter
        self.jitter = Jitter(jitter, "router jitter")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(self.jitter(x_BTD, sequence))
        shares_BTE = logits_BTE.softmax(-1)
        choices_BT1 = stable_topk(shares_BTE, 1)
        return RouterOutput(
            choices_BT1, shares_BTE.gather(-1, choices_BT1).to(x_BTD.dtype), logits_BTE, shares_BTE
        )
