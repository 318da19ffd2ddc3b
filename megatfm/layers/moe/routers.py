"""Routers, which choose each token's experts and the weights of their outputs.

Those that draw at random (jitter of inputs, noise of logits, sampling of second experts, hashes of token ids) draw by
keys of tokens, so that every layout draws the same.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import (
    DeepSeekV2RouterConfig,
    DeepSeekV3RouterConfig,
    MoEConfig,
    NoisyTopKRouterConfig,
    SwitchRouterConfig,
    TopKRouterConfig,
)
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import keyed_random as keyed
from megatfm.registry import Registry

# B batch, T tokens, D model width, E experts, K chosen experts, G groups of experts


class RouterOutput(NamedTuple):
    """A router's choices for each token.

    expert_indices: [B, T, K], best first; E means no expert. expert_weights: [B, T, K], factors on outputs.
    logits, probabilities: [B, T, E], inputs of auxiliary losses; probabilities sum to 1. balanced: by the name of an
    auxiliary loss, values [B, T, E] whose sums over the batch that loss balances between experts.
    """

    expert_indices: Tensor
    expert_weights: Tensor
    logits: Tensor
    probabilities: Tensor
    balanced: Mapping[str, Tensor] = MappingProxyType({})


class RowRedistribution(nn.Module):
    """Identity; under context parallelism a gather of full rows, or the split back to a rank's tokens."""

    def forward(self, x: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x


class Router(nn.Module):
    """Base class: computes a logit for each expert, in float32 at least; subclasses choose the experts.

    section: the router's section of the config.
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.section: Any = options.router
        self.n_experts, self.top_k, d = options.n_experts, options.top_k, config.d_model
        self.weight = nn.Parameter(torch.empty(self.n_experts, d))
        self.initial = {"weight": initial("dense", d, self.n_experts)}

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return logits [B, T, E]. In bfloat16, rounding would decide near ties (Fedus et al. 2022, section 2.4)."""
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        return F.linear(x_BTD.to(precise), self.weight.to(precise))

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        """Choose experts. Subclasses implement it."""
        raise NotImplementedError

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        """Update buffers after a step from the global batch's choices of each expert and means of `balanced`."""


ROUTERS: Registry[Callable[[ModelConfig, Initialiser], Any]] = Registry("router (model.ffn.router)")
"""Routers by name: modules called with x [B, T, D] and sequence, with `top_k` and `update` like Router."""


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Return the indices [..., k] of the k highest scores, highest first, ties by lower index.

    torch.topk does not define the order of ties, and changes it with the tensor's size.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@ROUTERS.register("top_k")
class TopKRouter(Router):
    """Top-k routing; weights are the chosen probabilities, normalised to sum to 1 (Mixtral, Qwen3) or not (OLMoE)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        router = require_variant(self.section, TopKRouterConfig, "model.ffn.router")
        self.normalise = router.norm_topk_prob
        self.bias = nn.Parameter(torch.empty(self.n_experts)) if router.bias else None
        if router.bias:
            self.initial["bias"] = Constant(0.0)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias
        probabilities_BTE = logits_BTE.softmax(-1)
        choices_BTK = stable_topk(probabilities_BTE, self.top_k)
        weights_BTK = probabilities_BTE.gather(-1, choices_BTK)
        if self.normalise:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        return RouterOutput(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, probabilities_BTE)


@ROUTERS.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Expert-choice routing (Zhou et al. 2022): each expert takes its ⌈top_k · T / E⌉ most probable tokens of a row.

    A token has `top_k` experts on average, and may have none or all. Weights are the probabilities.
    """

    tp_plan = (("gather_tokens", "gather_output_replicated"), ("split_tokens", "split_output"))

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        # Tensor parallelism gathers full rows, and splits them again, here.
        self.gather_tokens, self.split_tokens = nn.Identity(), nn.Identity()
        # Context parallelism gathers full rows, and splits them again, here.
        self.gather_row, self.split_row = RowRedistribution(), RowRedistribution()

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        probabilities_BTE = logits_BTE.softmax(-1)
        full_row_BSE = self.gather_row(self.gather_tokens(probabilities_BTE.detach()), sequence)
        full_row_BSE = self._choose(full_row_BSE, sequence.full_sequence.non_padding_mask)
        is_chosen_BTE = self.split_tokens(self.split_row(full_row_BSE, sequence))
        # Experts that chose a token come first. K is the most experts of any token, the same on every rank.
        order_BTE = stable_topk(is_chosen_BTE.to(torch.int8), self.n_experts)
        width = max(int(full_row_BSE.sum(-1).max()), 1) if len(full_row_BSE) else 1
        choices_BTK = order_BTE[..., :width]
        weights_BTK = probabilities_BTE.gather(-1, choices_BTK)
        choices_BTK = choices_BTK.where(is_chosen_BTE.gather(-1, choices_BTK), self.n_experts)
        return RouterOutput(choices_BTK, weights_BTK.to(x_BTD.dtype), logits_BTE, probabilities_BTE)

    def _choose(self, probabilities_BSE: Tensor, is_token_BS: Tensor) -> Tensor:
        S = probabilities_BSE.shape[1]
        capacity = min(math.ceil(self.top_k * S / self.n_experts), S)
        scores_BES = probabilities_BSE.masked_fill(~is_token_BS[..., None], -1).transpose(1, 2)
        is_chosen_BES = torch.zeros_like(scores_BES, dtype=torch.bool)
        is_chosen_BES.scatter_(-1, stable_topk(scores_BES, capacity), True)
        return is_chosen_BES.transpose(1, 2) & is_token_BS[..., None]


def mask_worse_groups(scores_BTE: Tensor, n_groups: int, n_best: int, n_scores: int) -> Tensor:
    """Set scores outside the `n_best` groups of experts with the highest sum of their `n_scores` best scores to −∞."""
    if n_best == n_groups:
        return scores_BTE
    scores_BTGx = scores_BTE.unflatten(-1, (n_groups, -1))
    sums_BTG = scores_BTGx.sort(-1, descending=True).values[..., :n_scores].sum(-1)
    is_best_BTG = torch.zeros_like(sums_BTG, dtype=torch.bool).scatter_(-1, stable_topk(sums_BTG, n_best), True)
    return scores_BTGx.masked_fill(~is_best_BTG[..., None], -math.inf).flatten(-2)


@ROUTERS.register("deepseek_v2")
class DeepSeekV2Router(Router):
    """DeepSeek-V2's router: top-k within the `topk_group` groups of experts with the best single expert.

    Weights are unnormalised probabilities times `routed_scaling_factor`.
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.options = require_variant(self.section, DeepSeekV2RouterConfig, "model.ffn.router")

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        probabilities_BTE = logits_BTE.softmax(-1)
        scores_BTE = mask_worse_groups(probabilities_BTE.detach(), self.options.n_group, self.options.topk_group, 1)
        choices_BTK = stable_topk(scores_BTE, self.top_k)
        weights_BTK = (probabilities_BTE.gather(-1, choices_BTK) * self.options.routed_scaling_factor).to(x_BTD.dtype)
        return RouterOutput(choices_BTK, weights_BTK, logits_BTE, probabilities_BTE)


@ROUTERS.register("deepseek_v3")
class DeepSeekV3Router(Router):
    """DeepSeek-V3's router: sigmoid scores, with a bias that affects the choice only, not the weights.

    After each step the bias of experts chosen less often than the mean rises, that of others falls, which balances load
    without an auxiliary loss (Wang et al. 2024).
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__(config, initial)
        self.options = require_variant(self.section, DeepSeekV3RouterConfig, "model.ffn.router")
        self.register_buffer("bias", torch.empty(self.n_experts), persistent=True)
        self.bias: Tensor
        self.initial |= {"bias": Constant(0.0)}

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        logits_BTE = self.logits(x_BTD)
        scores_BTE = logits_BTE.sigmoid()
        biased_BTE = scores_BTE.detach() + self.bias
        biased_BTE = mask_worse_groups(biased_BTE, self.options.n_group, self.options.topk_group, 2)
        choices_BTK = stable_topk(biased_BTE, self.top_k)
        weights_BTK = scores_BTE.gather(-1, choices_BTK)
        if self.options.norm_topk_prob:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        weights_BTK = (weights_BTK * self.options.routed_scaling_factor).to(x_BTD.dtype)
        return RouterOutput(choices_BTK, weights_BTK, logits_BTE, probabilities_BTE)

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        load_E = load_E.to(self.bias.dtype)
        self.bias += self.options.bias_update_rate * (load_E.mean() - load_E).sign()


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
