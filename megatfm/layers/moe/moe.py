"""Mixture-of-experts layers, routed and soft, and the auxiliary losses that balance routers."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig, SoftMoEConfig
from megatfm.cost import Cost, TokenCounts, compute_module_cost
from megatfm.layers.feed_forward import FFN, FFNS
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.loss_terms import AuxiliaryLoss, BlockOutput
from megatfm.layers.moe.experts import Experts
from megatfm.layers.moe.routers import ROUTERS, RouterOutput
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D model width, E experts, K chosen experts
# In soft mixtures: N documents of a row, S slots of all experts together, X = N · S


def load_balancing_loss(routing: RouterOutput, is_token_BT: Tensor, load_shares_E: Tensor) -> Tensor:
    """Return Σₜ E Σₑ shareₑ pₜₑ over tokens (Fedus et al. 2022, equation 4; Qiu et al. 2025): 1 a token when balanced.

    load_shares_E: each expert's share of all choices in the previous step's global batch.
    """
    probabilities_BTE = routing.probabilities
    weighted_BT = probabilities_BTE @ load_shares_E.to(probabilities_BTE.dtype) * len(load_shares_E)
    return weighted_BT.masked_fill(~is_token_BT, 0).sum()


class RowSums(nn.Module):
    """Sum over the tokens of each row; tensor parallelism sums over ranks too."""

    def forward(self, values_BTX: Tensor) -> Tensor:
        """Sum [B, T, X] to [B, X]."""
        return values_BTX.sum(1)


def count_choices_by_row(routing: RouterOutput, is_token_BT: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """Return [B, 1 + E]: the number of tokens of each row, and how often they chose each expert."""
    zeros_BTX = F.pad(torch.zeros_like(routing.probabilities), (0, 1))  # index E: no expert
    chosen_BTE = zeros_BTX.scatter(-1, routing.expert_indices, 1.0)[..., :-1].detach()
    is_token_BT1 = is_token_BT[..., None].to(chosen_BTE.dtype)
    return torch.cat([sums(is_token_BT1), sums(chosen_BTE * is_token_BT1)], dim=-1)


def sequence_load_balancing_loss(
    routing: RouterOutput, is_token_BT: Tensor, counts_BX: Tensor, sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return Σ over rows of E Σₑ fₑ Pₑ, with fₑ the share of a row's choices and Pₑ the mean probability of expert e: 1
    a row when balanced (DeepSeek-AI 2024, equations 17 to 20). counts_BX: `count_choices_by_row` of full rows.
    """
    tokens_B1, chosen_BE = counts_BX[:, :1].clamp(min=1), counts_BX[:, 1:]
    shares_BE = chosen_BE / (tokens_B1 * routing.expert_indices.shape[-1])
    summed_BE = sums(routing.probabilities.masked_fill(~is_token_BT[..., None], 0))
    return (shares_BE * summed_BE / tokens_B1).sum() * chosen_BE.shape[-1]


def z_loss(routing: RouterOutput, is_token_BT: Tensor) -> Tensor:
    """Return Σₜ logsumexp(logits)² (Zoph et al. 2022, equation 5)."""
    return routing.logits.logsumexp(-1).square().masked_fill(~is_token_BT, 0).sum()


def cv_squared_loss(values_BTE: Tensor, is_token_BT: Tensor, means_E: Tensor) -> Tensor:
    """Return tokens · CV², the squared coefficient of variation of expert sums (Shazeer et al. 2017, equations 7 and
    11).

    Linearised at the means of the previous step, so that it is a sum over tokens; exact if the means are this batch's.
    """
    n, total = len(means_E), means_E.sum()
    value = n * means_E.square().sum() / total.square() - 1
    slope_E = 2 * n / total * (means_E / total - means_E.square().sum() / total.square())
    losses_BT = value + values_BTE @ slope_E.to(values_BTE.dtype)
    return losses_BT.masked_fill(~is_token_BT, 0).sum()


def compute_squared_cv(sums_E: Tensor) -> float:
    """Return CV² of the experts' sums; 0 without tokens."""
    sums_E = sums_E.double()
    total = float(sums_E.sum())
    return float(len(sums_E) * sums_E.square().sum() / total**2 - 1) if total else 0.0


COUNT_STEP = 2.0**-24
"""Sums are taken in integer multiples of this step, so that they are equal on any layout and in any order."""


def quantise_counts(values_BTE: Tensor, is_token_BT: Tensor) -> Tensor:
    """Return int64 [E], the sum of quantised values over tokens, padding excepted."""
    steps_BTE = (values_BTE.detach().double() / COUNT_STEP).round().to(torch.int64)
    return steps_BTE.masked_fill(~is_token_BT[..., None], 0).sum((0, 1))


class NonPaddingMask(nn.Module):
    """Return boolean [B, T], false for padding."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        return sequence.non_padding_mask


@FFNS.register("moe")
class MoE(nn.Module):
    """Routed experts, chosen by a router for each token, plus shared experts for all tokens if configured.

    Padding is not routed and not counted. Choices beyond an expert's capacity are dropped: they contribute 0, and the
    residual stream carries the token on.
    """

    tp_plan = (
        ("", "sequence_parallel"),
        ("router", "sequence_parallel"),
        ("non_padding_mask", "split_output"),
        ("row_sums", "sum_tokens_by_row"),
        ("reduce_counts", "sum_output"),
        ("reduce_losses", "sum_output"),
    )

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.options, self.router = options.router, ROUTERS.get(options.router.name)(config, initial)
        self.non_padding_mask, self.experts = NonPaddingMask(), Experts(config, initial)
        self.shared = None
        if options.n_shared_experts:
            self.shared = FFN(config.with_changes({"ffn": options.shared_ffn}), initial)
        # Under parallelism, sums over a rank's tokens of a row become sums over the full row here.
        self.reduce_counts, self.reduce_losses, self.row_sums = nn.Identity(), nn.Identity(), RowSums()
        self.register_buffer("shares", torch.empty(options.n_experts), persistent=options.router.aux_loss_coef > 0)
        self.shares: Tensor
        self.initial = {"shares": Constant(1 / options.n_experts)}
        self.observed: dict[str, Tensor] = {}

    @property
    def cp_plan(self) -> str:
        """Plan of context parallelism: "moe" if routing needs full rows, else "local"."""
        needs_full_rows = self.options.seq_aux_loss_coef or self.options.is_bidirectional or self.experts.has_capacity
        return "moe" if needs_full_rows else "local"

    @staticmethod
    def terms(config: ModelConfig) -> dict[str, AuxiliaryLoss]:
        """Return the router's loss terms with a weight above 0."""
        router = require_variant(config.ffn, MoEConfig, "model.ffn").router
        losses = {
            "balance": AuxiliaryLoss(router.aux_loss_coef, "tokens"),
            "sequence_balance": AuxiliaryLoss(router.seq_aux_loss_coef, "rows"),
            "router_z": AuxiliaryLoss(router.z_loss_coef, "tokens"),
        }
        losses |= {
            name: AuxiliaryLoss(getattr(router, f"{name}_loss_coef"), "tokens") for name in router.balance_losses
        }
        return {name: term for name, term in losses.items() if term.weight}

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> BlockOutput:
        routing, is_token_BT = self.router(x_BTD, sequence), self.non_padding_mask(sequence)
        choices_BTK = routing.expert_indices.where(is_token_BT[..., None], len(self.shares))
        inputs = x_BTD, routing.expert_weights, choices_BTK, sequence
        if self.shared is not None and self.experts.ep_size > 1:
            shared: list[Tensor] = []
            add_shared_experts = partial(self._add_shared_experts, shared, x_BTD, sequence)
            y_BTD, is_within_capacity_BTK = self.experts(*inputs, add_shared_experts)
            y_BTD = y_BTD + shared[0]
        else:
            y_BTD, is_within_capacity_BTK = self.experts(*inputs)
            y_BTD = y_BTD if self.shared is None else y_BTD + self.shared(x_BTD, sequence)
        return BlockOutput(
            y_BTD,
            self._compute_losses(routing, is_token_BT),
            self._count_tokens(routing, is_token_BT, choices_BTK, is_within_capacity_BTK),
        )

    def _add_shared_experts(self, outputs: list[Tensor], x_BTD: Tensor, sequence: SequenceMetadata) -> None:
        """Append the output of the shared experts to `outputs`."""
        assert self.shared is not None
        outputs.append(self.shared(x_BTD, sequence))

    def _compute_losses(self, routing: RouterOutput, is_token_BT: Tensor) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        if self.options.aux_loss_coef:
            losses["balance"] = load_balancing_loss(routing, is_token_BT, self.shares)
        if self.options.seq_aux_loss_coef:
            counts_BX = self.reduce_counts(count_choices_by_row(routing, is_token_BT, self.row_sums))
            losses["sequence_balance"] = sequence_load_balancing_loss(routing, is_token_BT, counts_BX, self.row_sums)
        if self.options.z_loss_coef:
            losses["router_z"] = z_loss(routing, is_token_BT)
        for name, values_BTE in routing.balanced.items():
            means_E = self.router.get_buffer(name)
            losses[name] = cv_squared_loss(values_BTE, is_token_BT, means_E)
        if losses:
            sums = self.reduce_losses(torch.stack(list(losses.values())))
            losses = {name: sums[i].clone() for i, name in enumerate(losses)}  # FSDP2 warns of views
        return losses

    @torch.no_grad()
    def _count_tokens(
        self, routing: RouterOutput, is_token_BT: Tensor, choices_BTK: Tensor, is_within_capacity_BTK: Tensor
    ) -> dict[str, Tensor]:
        """Return the counts of a micro-batch.

        load [E]: choices of each expert, before capacity. dropped: choices beyond capacity. tokens: without padding.
        entropy: of the router's probabilities, in nats, summed over tokens. "balanced NAME" [E]: the sums that the loss
        NAME balances between experts.
        """
        load_E = torch.zeros(len(self.shares) + 1, dtype=torch.int64, device=choices_BTK.device)
        load_E = load_E.scatter_add(0, choices_BTK.flatten(), torch.ones_like(choices_BTK).flatten())[:-1]
        entropy_BT = torch.special.entr(routing.probabilities).sum(-1).masked_fill(~is_token_BT, 0)
        dropped = ((choices_BTK < len(self.shares)) & ~is_within_capacity_BTK).sum()
        return {
            "load": load_E,
            "dropped": dropped,
            "tokens": is_token_BT.sum(),
            "entropy": entropy_BT.double().sum(),
            **{f"balanced {name}": quantise_counts(numbers, is_token_BT) for name, numbers in routing.balanced.items()},
        }

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Add the counts of a micro-batch."""
        self.observed = {name: self.observed.get(name, 0) + value for name, value in counts.items()}

    def update(self, observed: Mapping[str, Tensor]) -> None:
        """Update the load shares for the next step's loss; a step without tokens changes nothing."""
        load_E, tokens = observed["load"], observed["tokens"]
        n_choices = load_E.sum()
        load_shares_E = load_E.double() / n_choices.clamp(min=1)
        self.shares.copy_(load_shares_E.where(n_choices > 0, self.shares.double()))
        means = {}
        for name in self.options.balance_losses:
            if (sums_E := observed.get(f"balanced {name}")) is None:
                continue
            means_E = sums_E.double() * COUNT_STEP / tokens.clamp(min=1)
            means[name] = means_E.where(tokens > 0, self.router.get_buffer(name).double())
        self.router.update(load_E, means)

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, float | list[float]]:
        """Return the metrics of a step.

        load: choices of each expert relative to the mean; load_max, load_min: the largest and smallest. dropped: share
        of choices beyond capacity, if limited. entropy: mean over tokens, in nats. importance_cv2, load_cv2: CV² of
        the balanced sums; the loss is a linearisation of it and may be negative.
        """
        load_E = observed["load"].double()
        n_choices = load_E.sum().clamp(min=1)
        loads = (load_E / n_choices * len(load_E)).tolist()
        dropped = {"dropped": float(observed["dropped"] / n_choices)} if self.experts.has_capacity else {}
        return {
            "load": loads,
            "load_max": max(loads),
            "load_min": min(loads),
            **dropped,
            "entropy": float(observed["entropy"] / observed["tokens"].clamp(min=1)),
            **{
                f"{name}_cv2": compute_squared_cv(observed[f"balanced {name}"])
                for name in self.options.balance_losses
                if f"balanced {name}" in observed
            },
        }

    def reset_counts(self) -> None:
        """Reset the counts."""
        self.observed = {}


class SlotGather(nn.Module):
    """Identity; context parallelism turns means over local tokens into means over all tokens of a row."""

    def forward(self, slot_inputs_BXD: Tensor, scores_BNTS: Tensor, choices_BX1: Tensor) -> tuple[Tensor, Tensor]:
        return slot_inputs_BXD, choices_BX1


class SlotOutputGather(nn.Module):
    """Identity; context parallelism gathers the experts' outputs for all slots of a row."""

    def forward(self, outputs_BXD: Tensor, slots: int) -> Tensor:
        return outputs_BXD


@FFNS.register("soft_moe")
class SoftMoE(nn.Module):
    """Soft mixture of experts (Puigcerver et al. 2024, algorithm 1), for encoders: means are over whole documents.

    Each slot's input is a weighted mean of a document's tokens; each token gets a weighted mean of slot outputs.
    """

    cp_plan = "soft_moe"

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, SoftMoEConfig, "model.ffn")
        self.slots = options.slots
        n_slots = options.n_experts * options.slots
        self.weight = nn.Parameter(torch.empty(n_slots, config.d_model))
        self.initial = {"weight": initial("dense", config.d_model, n_slots)}
        self.experts = Experts(config, initial)
        # Context parallelism replaces both, so that each rank runs its share of a row's slots.
        self.gather_slots, self.return_slots = SlotGather(), SlotOutputGather()

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of experts on the slots, and of the dispatch and combine products between tokens and
        slots."""
        slots, d = self.weight.shape
        mixing = 2.0 * tokens.n * slots * d
        return Cost(
            matmul_macs=tokens.n * slots * d, attention_macs=mixing, visible_attention_macs=mixing
        ) + compute_module_cost(self.experts, tokens.with_count(slots))

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_BTS = F.linear(x_BTD.to(precise), self.weight.to(precise))
        is_member_BNT = sequence.find_document_members()  # padding is in none
        scores_BNTS = logits_BTS[:, None].masked_fill(~is_member_BNT[..., None], float("-inf"))
        # NaN: documents that exist in other rows only.
        dispatch_weights_BNTS = scores_BNTS.softmax(2).nan_to_num(0.0)
        B, N, _, S = dispatch_weights_BNTS.shape
        slot_inputs_BXD = torch.einsum("bnts,btd->bnsd", dispatch_weights_BNTS.to(x_BTD.dtype), x_BTD).flatten(1, 2)
        choices_BX1 = (torch.arange(S, device=x_BTD.device) // self.slots).repeat(N).expand(B, -1)[..., None]
        slots_BXD, choices_BX1 = self.gather_slots(slot_inputs_BXD, scores_BNTS, choices_BX1)
        outputs_BXD, _ = self.experts(slots_BXD, torch.ones_like(slots_BXD[..., :1]), choices_BX1, sequence)
        outputs_BXD = self.return_slots(outputs_BXD, N * S)
        combine_weights_BNTS = logits_BTS.softmax(-1)[:, None] * is_member_BNT[..., None]
        outputs_BNSD = outputs_BXD.unflatten(1, (N, S))
        return torch.einsum("bnts,bnsd->btd", combine_weights_BNTS.to(x_BTD.dtype), outputs_BNSD)
