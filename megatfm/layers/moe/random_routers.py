"""Routers that draw at random: jitter of inputs, noise of logits, sampling of second experts, hashes of token ids.

All draws are keyed by tokens, so that every layout draws the same.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig, NoisyTopKRouterConfig, SwitchRouterConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.moe.routers import ROUTERS, Router, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import keyed_random as keyed

# B batch, T tokens, D model width, E experts, K chosen experts


class Jitter(Dropout):
    """Multiply by uniform draws from [1 − rate, 1 + rate] in training, keyed like dropout."""

    purpose = "the switch router's jitter"

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.active:
            return x_BTD
        draws_BTD = keyed.draw_uniform(self.token_rng_keys(sequence), x_BTD.shape[-1])
        return x_BTD * (1 + self.rate * (2 * draws_BTD - 1)).to(x_BTD.dtype)


@ROUTERS.register("switch")
class SwitchRouter(Router):
    """Switch routing (Fedus et al. 2022): each token goes to its most probable expert, weighted by the probability."""

    tp_plan = (("jitter", "local_token_dropout"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(self.section, SwitchRouterConfig, "model.ffn.router")
        self.jitter = Jitter(options.jitter, "router jitter")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(self.jitter(x_BTD, sequence))
        probabilities_BTE = logits_BTE.softmax(-1)
        choices_BT1 = stable_topk(probabilities_BTE, 1)
        return RouterOutput(
            choices_BT1, probabilities_BTE.gather(-1, choices_BT1).to(x_BTD.dtype), logits_BTE, probabilities_BTE
        )


class Noise(Dropout):
    """Standard normal draws of the input's shape in training, keyed like dropout; zeros in evaluation."""

    purpose = "the noisy_top_k router's noise"

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.training:
            return torch.zeros_like(x_BTD)
        draws_BTX = keyed.draw_uniform(self.token_rng_keys(sequence), 2 * x_BTD.shape[-1])
        radius_draws_BTD, angle_draws_BTD = draws_BTX.chunk(2, dim=-1)  # Box–Muller transform
        return ((-2 * radius_draws_BTD.log()).sqrt() * (2 * torch.pi * angle_draws_BTD).cos()).to(x_BTD.dtype)


@ROUTERS.register("noisy_top_k")
class NoisyTopKRouter(Router):
    """Noisy top-k gating (Shazeer et al. 2017); noise has a learned scale, weights are a softmax over the chosen.

    Auxiliary losses balance each expert's summed weight (importance) and its probability of being chosen under new
    noise (load).
    """

    tp_plan = (("noise", "local_token_dropout"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        options = require_variant(self.section, NoisyTopKRouterConfig, "model.ffn.router")
        self.noise = Noise(0.0, "router noise")
        self.noise_weight = nn.Parameter(torch.empty(self.n_experts, config.d_model))
        # Starts at 0; muP scales its learning rate like that of the other matrix with the same inputs.
        self.initial["noise_weight"] = Constant(0.0, width_ratio=self.initial["weight"].width_ratio)
        self.balance_losses = [name for name in options.balance_losses if getattr(options, f"{name}_loss_coef")]
        for name in self.balance_losses:
            self.register_buffer(name, torch.empty(self.n_experts), persistent=True)
            self.initial[name] = Constant(1 / self.n_experts)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        clean_BTE = self.logits(x_BTD)
        scale_BTE = F.softplus(F.linear(x_BTD.to(clean_BTE.dtype), self.noise_weight.to(clean_BTE.dtype)))
        logits_BTE = clean_BTE + self.noise(clean_BTE, sequence) * scale_BTE
        best_BTX = stable_topk(logits_BTE, self.top_k + 1)
        choices_BTK = best_BTX[..., : self.top_k]
        weights_BTK = logits_BTE.gather(-1, choices_BTK).softmax(-1)
        balanced: dict[str, Tensor] = {}
        if "importance" in self.balance_losses:
            balanced["importance"] = torch.zeros_like(logits_BTE).scatter(-1, choices_BTK, weights_BTK)
        if "load" in self.balance_losses:
            last_BT2 = logits_BTE.gather(-1, best_BTX[..., self.top_k - 1 :])
            chosen_BTE = torch.zeros_like(logits_BTE).scatter(-1, choices_BTK, 1.0).bool()
            # To be chosen, an expert's score must exceed the k-th best score of the others.
            threshold_BTE = last_BT2[..., 1:].where(chosen_BTE, last_BT2[..., :1])
            balanced["load"] = torch.special.ndtr((clean_BTE - threshold_BTE) / scale_BTE)
        return RouterOutput(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, logits_BTE.softmax(-1), balanced)

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        for name, means_E in means.items():
            self.get_buffer(name).copy_(means_E)


class SecondExpertSampling(Dropout):
    """Decide whether a token goes to its second expert, boolean [B, T]: with probability 2 · weight in training.

    Draws are keyed like dropout, so that every layout draws the same. In evaluation, wherever the weight is above 0.
    """

    purpose = "the gshard router's sampling of second experts"

    def forward(self, weights_BT: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.training:
            return weights_BT > 0
        return 2 * weights_BT > keyed.draw_uniform(self.token_rng_keys(sequence), 1)[..., 0]


@ROUTERS.register("gshard")
class GShardRouter(Router):
    """GShard's top-2 routing (Lepikhin et al. 2021); the two weights are normalised before the second is sampled."""

    tp_plan = (("sample_second", "local_token_dropout"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.sample_second = SecondExpertSampling(0.0, "second expert")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        probabilities_BTE = logits_BTE.softmax(-1)
        choices_BT2 = stable_topk(probabilities_BTE, 2)
        weights_BT2 = probabilities_BTE.gather(-1, choices_BT2)
        weights_BT2 = weights_BT2 / weights_BT2.sum(-1, keepdim=True)
        uses_second_BT = self.sample_second(weights_BT2[..., 1].detach(), sequence)
        second_BT = choices_BT2[..., 1].where(uses_second_BT, self.n_experts)
        choices_BT2 = torch.stack([choices_BT2[..., 0], second_BT], dim=-1)
        return RouterOutput(choices_BT2, weights_BT2.to(x_BTD.dtype), logits_BTE, probabilities_BTE)


class TokenHash(nn.Module):
    """Pseudo-random values [B, T, width] in (0, 1) that depend on the token id only."""

    def forward(self, sequence: SequenceMetadata, width: int) -> Tensor:
        return keyed.draw_uniform(self.token_rng_keys(sequence), width)

    def token_rng_keys(self, sequence: SequenceMetadata) -> Tensor:
        """Return ids int64 [B, T]. Raises UsageError where the model reads no tokens."""
        if sequence.tokens is None:
            raise UsageError(
                "model.ffn.router.name = 'hash' hashes token ids, but the model's input has none: choose another router"
            )
        return keyed.fold_in(sequence.tokens.long(), 1)


@ROUTERS.register("hash")
class HashRouter(nn.Module):
    """Hash routing (Roller et al. 2021): a token id determines its experts; all have the same weight."""

    tp_plan = (("token_hash", "local_token_dropout"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.top_k, self.n_experts, self.token_hash = options.top_k, options.n_experts, TokenHash()

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        scores_BTE = self.token_hash(sequence, self.n_experts)
        choices_BTK = stable_topk(scores_BTE, self.top_k)
        weights_BTK = torch.full(choices_BTK.shape, 1 / self.top_k, dtype=x_BTD.dtype, device=x_BTD.device)
        chosen_BTE = torch.zeros_like(scores_BTE).scatter(-1, choices_BTK, 1 / self.top_k)
        return RouterOutput(choices_BTK, weights_BTK, torch.zeros_like(scores_BTE), chosen_BTE)

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        """Do nothing: hash routing has no state."""
