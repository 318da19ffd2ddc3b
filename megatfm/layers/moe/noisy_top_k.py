"""The experts with the highest logits, noise added (Shazeer et al. 2017, equations 3 to 11)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig, NoisyTopKRouterConfig
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import dropout as keyed
from megatfm.ops.initial import Constant


class Noise(Dropout):
    """Standard normal numbers [B, T, width] in training, keyed as dropout is; 0 otherwise."""

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.training:
            return torch.zeros_like(x_BTD)
        draws_BTX = keyed.uniform(self.token_rng_keys(sequence), 2 * x_BTD.shape[-1])
        sizes_BTD, turns_BTD = draws_BTX.chunk(2, dim=-1)  # Box and Muller 1958
        return ((-2 * sizes_BTD.log()).sqrt() * (2 * torch.pi * turns_BTD).cos()).to(x_BTD.dtype)


@ROUTERS.register("noisy_top_k")
class NoisyTopKRouter(Router):
    """Weights are the softmax over the chosen. How strong the noise is follows from the token.

    Evened out are the experts' weights (importance), and how probably noise alone would have them chosen (load).
    """

    tp_plan = (("noise", "keys of own tokens"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        router = require_variant(options.router, NoisyTopKRouterConfig, "model.ffn.router")
        self.noise, self.n_experts = Noise(0.0, "router noise"), options.n_experts
        self.noise_weight = nn.Parameter(torch.empty(options.n_experts, config.d_model))
        # From 0 on, it learns as the other matrix that reads the same.
        self.initial["noise_weight"] = Constant(0.0, width_ratio=self.initial["weight"].width_ratio)
        self.evens = [name for name in router.evens if getattr(router, f"{name}_loss_coef")]
        for name in self.evens:
            self.register_buffer(name, torch.empty(options.n_experts), persistent=True)
            self.initial[name] = Constant(1 / options.n_experts)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        clean_BTE = self.logits(x_BTD)
        scale_BTE = F.softplus(F.linear(x_BTD.to(clean_BTE.dtype), self.noise_weight.to(clean_BTE.dtype)))
        logits_BTE = clean_BTE + self.noise(clean_BTE, sequence) * scale_BTE
        best_BTX = stable_topk(logits_BTE, self.top_k + 1)
        choices_BTK = best_BTX[..., : self.top_k]
        weights_BTK = logits_BTE.gather(-1, choices_BTK).softmax(-1)
        evened: dict[str, Tensor] = {}
        if "importance" in self.evens:
            evened["importance"] = torch.zeros_like(logits_BTE).scatter(-1, choices_BTK, weights_BTK)
        if "load" in self.evens:
            last_BT2 = logits_BTE.gather(-1, best_BTX[..., self.top_k - 1 :])
            chosen_BTE = torch.zeros_like(logits_BTE).scatter(-1, choices_BTK, 1.0).bool()
            # What an expert must exceed is the best that the others leave for it.
            bar_BTE = last_BT2[..., 1:].where(chosen_BTE, last_BT2[..., :1])
            evened["load"] = torch.special.ndtr((clean_BTE - bar_BTE) / scale_BTE)
        return RouterOutput(
            choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, logits_BTE.softmax(-1), evened
        )

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        for name, means_E in means.items():
            self.get_buffer(name).copy_(means_E)
