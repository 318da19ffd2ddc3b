"""Experts: feed-forward networks side by side, their matrices stacked."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.activation import ACTIVATIONS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.dispatch import Rows, expert_capacity, sort_by_expert, within_capacity
from megatfm.layers.moe.router import RowSeam
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.grouped import grouped_linear, kernel_for
from megatfm.ops.initial import Constant

# B batch, T tokens, K chosen experts, M = B · T · K choices, R of them that are reached, D model width


log = logging.getLogger("megatfm")

CAUSAL = ("decoder", "encoder_decoder")
"""Families with a stack in which no token may depend on a later one."""


class Experts(nn.Module):
    """Σₖ weightₖ FFNₑ₍ₖ₎(x) over the experts that are reached from here.

    groups: into how many, one after the other, experts are divided; of each group those from number `first` on are
    reached, as many as are here. `each` takes rows to all of them.
    """

    tp_plan = (
        ("", "experts"),
        ("gathered", "enter experts"),
        ("whole", "whole choices"),
        ("own", "own choices"),
        ("taken", "taken choices"),
        ("summed", "leave experts"),
    )

    is_compiled = False
    """Not with the block around it: torch compiles grouped products in bfloat16 only, and numbers of rows that follow
    from what tokens are would have it compile again and again."""

    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        activation, n, d, d_ff = (
            ACTIVATIONS.get(options.activation),
            options.n_experts,
            config.d_model,
            options.d_ff,
        )
        self.activation, self.n_experts, self.first = activation, n, 0
        self.capacity, self.places = options.capacity_factor, options.expert_capacity
        self.by_position, self.is_unlimited = options.drop_policy == "position", False
        if options.is_limited and options.top_k > 1 and not self.by_position and config.family in CAUSAL:
            _warn_of_future(options.top_k)
        self.top_k, self.ep_size = options.top_k, 1
        self.initial = {"w_up": initial("ffn_in", d, d_ff), "w_down": initial("ffn_out", d_ff, d)}
        self.w_gate = None
        if activation.gated:
            self.w_gate = nn.Parameter(torch.empty(n, d_ff, d))
            self.initial |= {"w_gate": initial("ffn_gate", d, d_ff)}
        self.w_up = nn.Parameter(torch.empty(n, d_ff, d))
        self.w_down = nn.Parameter(torch.empty(n, d, d_ff))
        biases = {"b_gate": d_ff, "b_up": d_ff, "b_down": d} if options.bias else {}
        for name in ("b_gate", "b_up", "b_down"):
            made = name in biases and (activation.gated or name != "b_gate")
            self.register_parameter(name, nn.Parameter(torch.empty(n, biases[name])) if made else None)
            if made:
                self.initial[name] = Constant(0.0)
        self.roles = {name: "vector" if name in biases else "matrices" for name in self.initial}
        self.down_bias_scale = 1.0  # of the last bias, where others add the rest
        # Where ranks that share the experts get each other's tokens, and their parts of the sums.
        self.gathered, self.taken, self.summed = nn.Identity(), nn.Identity(), nn.Identity()
        # Where ranks that have a part of each row get its other choices, and their part of what follows from all.
        self.whole, self.own = RowSeam(), RowSeam()

    def cost(self, tokens: TokenCounts) -> Cost:
        """A token meets those experts that it chooses."""
        one = sum(parameter[0].numel() for parameter in self.parameters())
        matrices = sum(parameter[0].numel() for parameter in self.parameters() if parameter.dim() > 2)
        return Cost(
            matmul_macs=self.top_k * matrices * tokens.n,
            vector_macs=self.top_k * (one - matrices) * tokens.n,
            inactive_parameters=(self.n_experts - self.top_k) * one,
        )

    @property
    def has_capacity(self) -> bool:
        """Whether an expert takes no more than so many tokens of a row."""
        return (self.capacity is not None or self.places is not None) and not self.is_unlimited

    @property
    def uses_expert_parallelism(self) -> bool:
        """Whether rows travel to other ranks."""
        return self.ep_size > 1

    def forward(
        self,
        x_BTD: Tensor,
        weights_BTK: Tensor,
        choices_BTK: Tensor,
        sequence: SequenceMetadata,
        overlap_with: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y [B, T, D], and which choices were taken, boolean [B, T, K]. A choice of `n_experts` is none.

        overlap_with: what is done while rows travel; only where they do.
        """
        x_BTD, weights_BTK, choices_BTK = map(self.gathered, (x_BTD, weights_BTK, choices_BTK))
        taken_BTK = choices_BTK < self.n_experts
        if self.has_capacity:
            of_row_BSK = self.whole(choices_BTK, sequence)
            places = self.places or expert_capacity(of_row_BSK, self.n_experts, self.capacity or 1.0)
            taken_BSK = within_capacity(of_row_BSK, self.n_experts, places, by_position=self.by_position)
            taken_BTK = taken_BTK & self.own(taken_BSK, sequence)
        reached_M = self._reached(choices_BTK.where(taken_BTK, self.n_experts).flatten())
        order_M, offs_E = sort_by_expert(reached_M, self.ep_size * len(self.w_up))
        rows = Rows(order_M, offs_E, choices_BTK.shape[-1])
        x_ND = x_BTD.flatten(0, 1)
        given = () if overlap_with is None else (overlap_with,)
        made_RD = rows.zero_undefined(self.run_experts(rows.dispatch(x_ND), offs_E, *given))
        made_RD = made_RD * weights_BTK.flatten().index_select(0, rows.order)[:, None]
        return self.summed(rows.combine(made_RD, len(x_ND)).view_as(x_BTD)), self.taken(taken_BTK)

    def _reached(self, choices_M: Tensor) -> Tensor:
        """The places of choices among the experts that are reached; −1, or one too large, for others."""
        of_group, here = self.n_experts // self.ep_size, len(self.w_up)
        within_M = choices_M % of_group - self.first
        places_M = choices_M // of_group * here + within_M
        return places_M.where((within_M >= 0) & (within_M < here), -1)

    def run_experts(self, rows_MD: Tensor, offs_E: Tensor) -> Tensor:
        """FFNₑ of rows sorted by expert, up to where each expert's end. What lies beyond is undefined."""
        log_once(kernel_for(rows_MD, self.w_up), rows_MD.device.type, rows_MD.dtype)
        inner_MF = self._product(rows_MD, self.w_up, self.b_up, offs_E)
        if self.w_gate is None:
            inner_MF = self.activation.function(inner_MF)
        else:
            inner_MF = self.activation(self._product(rows_MD, self.w_gate, self.b_gate, offs_E), inner_MF)
        b_down = (
            self.b_down
            if self.b_down is None or self.down_bias_scale == 1
            else self.b_down * self.down_bias_scale
        )
        return self._product(inner_MF, self.w_down, b_down, offs_E)

    def _product(self, rows_MI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, offs_E: Tensor) -> Tensor:
        made_MO = grouped_linear(rows_MI, weight_EOI, offs_E)
        if bias_EO is None:
            return made_MO
        places_M = torch.arange(len(rows_MI), device=rows_MI.device, dtype=offs_E.dtype)
        experts_M = torch.searchsorted(offs_E, places_M, right=True)
        is_beyond_M1 = (experts_M == len(bias_EO))[:, None]
        biases_MO = bias_EO[experts_M.clamp(max=len(bias_EO) - 1)]
        return made_MO + biases_MO.masked_fill(is_beyond_M1, 0)  # where gradients are undefined, too


@cache
def log_once(kernel: str, device: str, dtype: torch.dtype) -> None:
    """Log once which kernel multiplies experts with their rows."""
    log.info("experts on %s in %s: kernel %s", device, str(dtype)[6:], kernel)


@contextmanager
def without_capacity(model: nn.Module) -> Iterator[None]:
    """Have all experts of a model take every token meanwhile, as in generation.

    A capacity follows from the length of a row, so a text that grows token by token would be another model's in each
    step, and of single tokens none is ever dropped.
    """
    limited = [module for module in model.modules() if isinstance(module, Experts) and module.has_capacity]
    for experts in limited:
        _tell_of_generation()
        experts.is_unlimited = True
    try:
        yield
    finally:
        for experts in limited:
            experts.is_unlimited = False


@cache
def _tell_of_generation() -> None:
    log.info(
        "generation: experts take all tokens that choose them; model.ffn.capacity_factor limits training and evaluation"
    )


@cache
def _warn_of_future(top_k: int) -> None:
    """Warn once that a causal model sees the future."""
    log.warning(
        f"model.ffn.capacity_factor with top_k = {top_k} in a causal model: whether a token keeps its last "
        f"choices depends on "
        'later tokens of its row, which are not there in generation: set model.ffn.drop_policy = "position"'
    )
