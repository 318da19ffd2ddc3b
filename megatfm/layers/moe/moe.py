"""A mixture of experts in the place of a feed-forward network."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.layers.extra import AuxiliaryLoss, BlockOutput
from megatfm.layers.ffn.dense import FFN
from megatfm.layers.ffn.registry import FFNS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe import balance
from megatfm.layers.moe.experts import Experts
from megatfm.layers.moe.router import ROUTERS, RouterOutput
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.initial import Constant

# B batch, T tokens, D model width, E experts, K chosen experts


class RealTokens(nn.Module):
    """Boolean [B, T]: which tokens are no padding."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        if sequence.documents is None:
            return torch.ones_like(sequence.positions, dtype=torch.bool)
        return sequence.documents >= 0


@FFNS.register("moe")
class MoE(nn.Module):
    """Each token goes through the experts that the router chooses, and all go through shared ones, if there are any.

    Padding goes through no expert that is chosen, and counts nowhere. What a capacity leaves out is 0: the residual
    stream carries it on.
    """

    tp_plan = (
        ("", "sequence"),
        ("router", "sequence"),
        ("real", "sequence output"),
        ("row_sums", "sums of rows"),
        ("counted", "sequence sum"),
        ("total", "sequence sum"),
    )

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.options, self.router = options.router, ROUTERS.get(options.router.name)(config, initial)
        self.real, self.experts = RealTokens(), Experts(config, initial)
        self.shared = None
        if options.n_shared_experts:
            self.shared = FFN(config.with_changes({"ffn": options.shared}), initial)
        # Where sums over a part of the row become those over all of it.
        self.counted, self.total, self.row_sums = nn.Identity(), nn.Identity(), balance.RowSums()
        self.register_buffer(
            "shares", torch.empty(options.n_experts), persistent=options.router.aux_loss_coef > 0
        )
        self.shares: Tensor
        self.initial = {"shares": Constant(1 / options.n_experts)}
        self.observed: dict[str, Tensor] = {}

    @property
    def cp_plan(self) -> str:
        """See `parallel.cp_method`."""
        of_rows = self.options.seq_aux_loss_coef or self.options.of_encoders or self.experts.has_capacity
        return "experts" if of_rows else "alone"

    @staticmethod
    def terms(config: ModelConfig) -> dict[str, AuxiliaryLoss]:
        """The router's loss terms whose weight is not 0."""
        router = require_variant(config.ffn, MoEConfig, "model.ffn").router
        every = {
            "balance": AuxiliaryLoss(router.aux_loss_coef, "tokens"),
            "sequence_balance": AuxiliaryLoss(router.seq_aux_loss_coef, "rows"),
            "router_z": AuxiliaryLoss(router.z_loss_coef, "tokens"),
        }
        every |= {
            name: AuxiliaryLoss(getattr(router, f"{name}_loss_coef"), "tokens") for name in router.evens
        }
        return {name: term for name, term in every.items() if term.weight}

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> BlockOutput:
        routing, real_BT = self.router(x_BTD, sequence), self.real(sequence)
        choices_BTK = routing.expert_indices.where(real_BT[..., None], len(self.shares))
        shared: list[Tensor] = []
        inputs = x_BTD, routing.expert_weights, choices_BTK, sequence
        if self.shared is None:
            y_BTD, taken_BTK = self.experts(*inputs)
        elif self.experts.uses_expert_parallelism:
            of_all = partial(self._share, shared, x_BTD, sequence)
            y_BTD, taken_BTK = self.experts(*inputs, of_all)
            y_BTD = y_BTD + shared[0]
        else:
            y_BTD, taken_BTK = self.experts(*inputs)
            y_BTD = y_BTD + self.shared(x_BTD, sequence)
        return BlockOutput(
            y_BTD, self._losses(routing, real_BT), self._counts(routing, real_BT, choices_BTK, taken_BTK)
        )

    def _share(self, made: list[Tensor], x_BTD: Tensor, sequence: SequenceMetadata) -> None:
        """Add what the shared experts make to a list."""
        assert self.shared is not None
        made.append(self.shared(x_BTD, sequence))

    def _losses(self, routing: RouterOutput, real_BT: Tensor) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        if self.options.aux_loss_coef:
            losses["balance"] = balance.load_balancing_loss(routing, real_BT, self.shares)
        if self.options.seq_aux_loss_coef:
            counts_BX = self.counted(balance.row_expert_counts(routing, real_BT, self.row_sums))
            losses["sequence_balance"] = balance.sequence_load_balancing_loss(
                routing, real_BT, counts_BX, self.row_sums
            )
        if self.options.z_loss_coef:
            losses["router_z"] = balance.z_loss(routing, real_BT)
        for name, numbers_BTE in routing.balanced.items():
            means_E = self.router.get_buffer(name)
            losses[name] = balance.cv_squared_loss(numbers_BTE, real_BT, means_E)
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
                f"evened {name}": balance.quantise_counts(numbers, real_BT)
                for name, numbers in routing.balanced.items()
            },
        }

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Add the counts of a micro-batch."""
        self.observed = {name: self.observed.get(name, 0) + value for name, value in counts.items()}

    def update(self, observed: Mapping[str, Tensor]) -> None:
        """The shares of this step are those that the next one is balanced by; one without tokens changes nothing."""
        load_E, tokens = observed["load"], observed["tokens"]
        chosen = load_E.sum()
        shares_E = load_E.double() / chosen.clamp(min=1)
        self.shares.copy_(shares_E.where(chosen > 0, self.shares.double()))
        means = {}
        for name in self.options.evens:
            if (sums_E := observed.get(f"evened {name}")) is None:
                continue
            means_E = sums_E.double() * balance.STEP / tokens.clamp(min=1)
            means[name] = means_E.where(tokens > 0, self.router.get_buffer(name).double())
        self.router.update(load_E, means)

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, float | list[float]]:
        """Of a step. load: how often each expert was chosen, as a multiple of the mean; load_max, load_min: of the
        busiest and the idlest; dropped: share of the choices that a capacity left out, if there is one; entropy: of
        a token's probabilities, in nats; importance_cv2, load_cv2: of what is evened CV² itself, of which the loss is a
        tangent that may be negative."""
        load_E = observed["load"].double()
        chosen = load_E.sum().clamp(min=1)
        loads = (load_E / chosen * len(load_E)).tolist()
        dropped = {"dropped": float(observed["dropped"] / chosen)} if self.experts.has_capacity else {}
        return {
            "load": loads,
            "load_max": max(loads),
            "load_min": min(loads),
            **dropped,
            "entropy": float(observed["entropy"] / observed["tokens"].clamp(min=1)),
            **{
                f"{name}_cv2": balance.squared_cv(observed[f"evened {name}"])
                for name in self.options.evens
                if f"evened {name}" in observed
            },
        }

    def reset_counts(self) -> None:
        """Begin to count anew."""
        self.observed = {}
