"""Mixtures of experts in the place of a feed-forward network, and the auxiliary losses that keep routers balanced."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig
from megatfm.layers.feed_forward import FFN, FFNS
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.loss_terms import AuxiliaryLoss, BlockOutput
from megatfm.layers.moe.experts import Experts
from megatfm.layers.moe.routers import ROUTERS, RouterOutput
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D model width, E experts, K chosen experts


def load_balancing_loss(routing: RouterOutput, real_BT: Tensor, shares_E: Tensor) -> Tensor:
    """Σₜ E Σₑ shareₑ pₜₑ over tokens (Fedus et al. 2022, equation 4; Qiu et al. 2025): 1 a token where all is even.

    shares: of all choices of a global batch, that of the step before.
    """
    probabilities_BTE = routing.probabilities
    weighted_BT = probabilities_BTE @ shares_E.to(probabilities_BTE.dtype) * len(shares_E)
    return weighted_BT.masked_fill(~real_BT, 0).sum()


class RowSums(nn.Module):
    """Sums over the tokens of each row."""

    def forward(self, numbers_BTX: Tensor) -> Tensor:
        """[B, X]."""
        return numbers_BTX.sum(1)


def row_expert_counts(routing: RouterOutput, real_BT: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, 1 + E]: tokens of each row, and how often each expert was chosen for them."""
    places_BTX = F.pad(torch.zeros_like(routing.probabilities), (0, 1))  # the last for none
    chosen_BTE = places_BTX.scatter(-1, routing.expert_indices, 1.0)[..., :-1].detach()
    kept_BT1 = real_BT[..., None].to(chosen_BTE.dtype)
    return torch.cat([sums(kept_BT1), sums(chosen_BTE * kept_BT1)], dim=-1)


def sequence_load_balancing_loss(
    routing: RouterOutput, real_BT: Tensor, counts_BX: Tensor, sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Σ over rows of E Σₑ fₑ Pₑ, with shares of a row's choices and mean probabilities of its tokens (DeepSeek-AI 2024,
    equations 17 to 20): 1 a row where all is even. counts: as of `row_expert_counts`, over whole rows."""
    tokens_B1, chosen_BE = counts_BX[:, :1].clamp(min=1), counts_BX[:, 1:]
    shares_BE = chosen_BE / (tokens_B1 * routing.expert_indices.shape[-1])
    summed_BE = sums(routing.probabilities.masked_fill(~real_BT[..., None], 0))
    return (shares_BE * summed_BE / tokens_B1).sum() * chosen_BE.shape[-1]


def z_loss(routing: RouterOutput, real_BT: Tensor) -> Tensor:
    """Σₜ logsumexp(logits)² (Zoph et al. 2022, equation 5)."""
    return routing.logits.logsumexp(-1).square().masked_fill(~real_BT, 0).sum()


def cv_squared_loss(numbers_BTE: Tensor, real_BT: Tensor, means_E: Tensor) -> Tensor:
    """Σ over tokens of what adds up to tokens · CV², the squared coefficient of variation of their sums (Shazeer et al.
    2017, equations 7 and 11): its tangent at the means of the step before, exact where they are this batch's own."""
    n, total = len(means_E), means_E.sum()
    value = n * means_E.square().sum() / total.square() - 1
    slope_E = 2 * n / total * (means_E / total - means_E.square().sum() / total.square())
    each_BT = value + numbers_BTE @ slope_E.to(numbers_BTE.dtype)
    return each_BT.masked_fill(~real_BT, 0).sum()


def squared_cv(sums_E: Tensor) -> float:
    """Return CV² of sums over tokens; 0 where there was no token."""
    sums_E = sums_E.double()
    total = float(sums_E.sum())
    return float(len(sums_E) * sums_E.square().sum() / total**2 - 1) if total else 0.0


STEP = 2.0**-24
"""Numbers are counted in steps of this size: whole numbers add up to the same in any order, on any layout."""


def quantise_counts(numbers_BTE: Tensor, real_BT: Tensor) -> Tensor:
    """int64 [E], the sum over tokens that are no padding."""
    steps_BTE = (numbers_BTE.detach().double() / STEP).round().to(torch.int64)
    return steps_BTE.masked_fill(~real_BT[..., None], 0).sum((0, 1))


class RealTokens(nn.Module):
    """Boolean [B, T]: which tokens are no padding."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        if sequence.documents is None:
            return torch.ones_like(sequence.positions, dtype=torch.bool)
        return sequence.documents >= 0


@FFNS.register("moe")
class MoE(nn.Module):
    """Each token goes through the experts that the router chooses, and all go through shared ones, if there are any.

    Padding goes through no expert that is chosen, and counts nowhere. Choices beyond the capacity give 0: the residual
    stream carries it on.
    """

    tp_plan = (
        ("", "sequence_parallel"),
        ("router", "sequence_parallel"),
        ("real", "split_output"),
        ("row_sums", "sum_tokens_by_row"),
        ("counted", "sum_output"),
        ("total", "sum_output"),
    )

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.options, self.router = options.router, ROUTERS.get(options.router.name)(config, initial)
        self.real, self.experts = RealTokens(), Experts(config, initial)
        self.shared = None
        if options.n_shared_experts:
            self.shared = FFN(config.with_changes({"ffn": options.shared}), initial)
        # Seam at which sums over a part of the row become sums over all of it.
        self.counted, self.total, self.row_sums = nn.Identity(), nn.Identity(), RowSums()
        self.register_buffer(
            "shares", torch.empty(options.n_experts), persistent=options.router.aux_loss_coef > 0
        )
        self.shares: Tensor
        self.initial = {"shares": Constant(1 / options.n_experts)}
        self.observed: dict[str, Tensor] = {}

    @property
    def cp_plan(self) -> str:
        """See `parallel.cp_method`."""
        needs_full_rows = (
            self.options.seq_aux_loss_coef or self.options.of_encoders or self.experts.has_capacity
        )
        return "moe" if needs_full_rows else "local"

    @staticmethod
    def terms(config: ModelConfig) -> dict[str, AuxiliaryLoss]:
        """The router's loss terms whose weight is not 0."""
        router = require_variant(config.ffn, MoEConfig, "model.ffn").router
        costs = {
            "balance": AuxiliaryLoss(router.aux_loss_coef, "tokens"),
            "sequence_balance": AuxiliaryLoss(router.seq_aux_loss_coef, "rows"),
            "router_z": AuxiliaryLoss(router.z_loss_coef, "tokens"),
        }
        costs |= {
            name: AuxiliaryLoss(getattr(router, f"{name}_loss_coef"), "tokens") for name in router.evens
        }
        return {name: term for name, term in costs.items() if term.weight}

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> BlockOutput:
        routing, real_BT = self.router(x_BTD, sequence), self.real(sequence)
        choices_BTK = routing.expert_indices.where(real_BT[..., None], len(self.shares))
        shared: list[Tensor] = []
        inputs = x_BTD, routing.expert_weights, choices_BTK, sequence
        if self.shared is None:
            y_BTD, taken_BTK = self.experts(*inputs)
        elif self.experts.uses_expert_parallelism:
            shared_output = partial(self._share, shared, x_BTD, sequence)
            y_BTD, taken_BTK = self.experts(*inputs, shared_output)
            y_BTD = y_BTD + shared[0]
        else:
            y_BTD, taken_BTK = self.experts(*inputs)
            y_BTD = y_BTD + self.shared(x_BTD, sequence)
        return BlockOutput(
            y_BTD, self._losses(routing, real_BT), self._counts(routing, real_BT, choices_BTK, taken_BTK)
        )

    def _share(self, outputs: list[Tensor], x_BTD: Tensor, sequence: SequenceMetadata) -> None:
        """Append the output of the shared experts to a list."""
        assert self.shared is not None
        outputs.append(self.shared(x_BTD, sequence))

    def _losses(self, routing: RouterOutput, real_BT: Tensor) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        if self.options.aux_loss_coef:
            losses["balance"] = load_balancing_loss(routing, real_BT, self.shares)
        if self.options.seq_aux_loss_coef:
            counts_BX = self.counted(row_expert_counts(routing, real_BT, self.row_sums))
            losses["sequence_balance"] = sequence_load_balancing_loss(
                routing, real_BT, counts_BX, self.row_sums
            )
        if self.options.z_loss_coef:
            losses["router_z"] = z_loss(routing, real_BT)
        for name, numbers_BTE in routing.balanced.items():
            means_E = self.router.get_buffer(name)
            losses[name] = cv_squared_loss(numbers_BTE, real_BT, means_E)
        if losses:
            sums = self.total(torch.stack(list(losses.values())))
            losses = {name: sums[i].clone() for i, name in enumerate(losses)}  # FSDP2 warns of views
        return losses

    @torch.no_grad()
    def _counts(
        self, routing: RouterOutput, real_BT: Tensor, choices_BTK: Tensor, taken_BTK: Tensor
    ) -> dict[str, Tensor]:
        """load [E]: choices by expert, before a capacity; dropped: of these; entropy: summed over tokens, in nats; and
        what is evened, which may be called a load as well."""
        load_E = torch.zeros(len(self.shares) + 1, dtype=torch.int64, device=choices_BTK.device)
        load_E = load_E.scatter_add(0, choices_BTK.flatten(), torch.ones_like(choices_BTK).flatten())[:-1]
        entropy_BT = torch.special.entr(routing.probabilities).sum(-1).masked_fill(~real_BT, 0)
        dropped = ((choices_BTK < len(self.shares)) & ~taken_BTK).sum()
        return {
            "load": load_E,
            "dropped": dropped,
            "tokens": real_BT.sum(),
            "entropy": entropy_BT.double().sum(),
            **{
                f"evened {name}": quantise_counts(numbers, real_BT)
                for name, numbers in routing.balanced.items()
            },
        }

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Add the counts of a micro-batch."""
        self.observed = {name: self.observed.get(name, 0) + value for name, value in counts.items()}

    def update(self, observed: Mapping[str, Tensor]) -> None:
        """The shares of this step balance the next one; one without tokens changes nothing."""
        load_E, tokens = observed["load"], observed["tokens"]
        n_choices = load_E.sum()
        shares_E = load_E.double() / n_choices.clamp(min=1)
        self.shares.copy_(shares_E.where(n_choices > 0, self.shares.double()))
        means = {}
        for name in self.options.evens:
            if (sums_E := observed.get(f"evened {name}")) is None:
                continue
            means_E = sums_E.double() * STEP / tokens.clamp(min=1)
            means[name] = means_E.where(tokens > 0, self.router.get_buffer(name).double())
        self.router.update(load_E, means)

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, float | list[float]]:
        """Metrics of a step. load: how often each expert was chosen, over the mean; load_max, load_min: of the
        busiest and the idlest; dropped: share of the choices that a capacity left out, if there is one; entropy: of
        a token's probabilities, in nats; importance_cv2, load_cv2: of what is evened CV² itself, of which the loss is a
        tangent that may be negative."""
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
                f"{name}_cv2": squared_cv(observed[f"evened {name}"])
                for name in self.options.evens
                if f"evened {name}" in observed
            },
        }

    def reset_counts(self) -> None:
        """Begin to count anew."""
        self.observed = {}
