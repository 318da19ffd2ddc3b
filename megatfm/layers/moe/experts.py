"""Experts, feed-forward networks with stacked matrices, and how tokens are dispatched to them and combined again."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.moe.routers import RowSeam
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.grouped_mm import grouped_linear, kernel_for
from megatfm.ops.torch_private import is_fake

# B batch, T tokens, N = B · T, K chosen experts, M = N · K choices, R of them some expert's here, D model width


def expert_capacity(choices_BTK: Tensor, n_experts: int, factor: float) -> int:
    """⌈factor · T · K / experts⌉, where the product is a float: a factor of 1.1, 100 tokens and 10 experts give 12."""
    return math.ceil(factor * choices_BTK.shape[1] * choices_BTK.shape[2] / n_experts)


def within_capacity(
    choices_BTK: Tensor, n_experts: int, capacity: int, *, by_position: bool = False
) -> Tensor:
    """Boolean [B, T, K]: the choices of each row that its experts still take, so many each.

    First all first choices in the order of the tokens, then all second ones, … (Lepikhin et al. 2021, algorithm 1).
    by_position: all choices of a token before those of the next, as Megatron-LM's drop policy of that name, so that
    what is taken of a token depends on none after it. A row's choices depend on no other row's. Choices of `n_experts`,
    that is of none, are taken.
    """
    B, T, K = choices_BTK.shape
    turns_BXX = choices_BTK if by_position else choices_BTK.transpose(1, 2)
    in_turn_BM = turns_BXX.reshape(B, K * T)
    order_BM = in_turn_BM.argsort(dim=1, stable=True)
    sorted_BM = in_turn_BM.gather(1, order_BM)
    first_BM = torch.searchsorted(sorted_BM, sorted_BM)  # where the expert's choices begin
    places_BM = torch.arange(K * T, device=choices_BTK.device) - first_BM
    taken_BM = torch.zeros_like(in_turn_BM, dtype=torch.bool)
    taken_BM.scatter_(1, order_BM, (places_BM < capacity) | (sorted_BM == n_experts))
    return taken_BM.view(B, T, K) if by_position else taken_BM.view(B, K, T).transpose(1, 2)


def sort_by_expert(choices_M: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """The order [M] of choices by expert, and where in it each expert's end, int32 [n_experts].

    Other choices than 0 to n_experts − 1 come last. Choices of one expert stay in their order.
    """
    known_M = choices_M.where((choices_M >= 0) & (choices_M < n_experts), n_experts)
    sorted_M, order_M = known_M.sort(stable=True)
    experts_E = torch.arange(n_experts, device=choices_M.device)
    return order_M, torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)


def is_host_readable(tensor: Tensor) -> bool:
    """Whether the host may look into it: a GPU would have to be waited for."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


class SortedRows:
    """Rows of tokens in the order of choices by expert, and sums of such rows over the choices of each token.

    order: int64 [M], ends: int32 [E], as `sort_by_expert` gives them. What experts make of choices that are none's is
    undefined, and so are its gradients: where the host may look, such rows are cut off (R < M), elsewhere they are set
    to 0. There sums go by token, not by adding rows to tokens, which GPUs do in an order of their own each time.
    """

    def __init__(self, order_M: Tensor, ends_E: Tensor, top_k: int) -> None:
        self.order, self._k = order_M, top_k
        self._places: Tensor | None = None
        self._is_rest_M1: Tensor | None = None
        if is_host_readable(order_M):
            self.order = order_M[: int(ends_E[-1])]
            return
        index_M = torch.arange(len(order_M), device=order_M.device)
        self._places = torch.empty_like(order_M).scatter_(0, order_M, index_M)
        self._is_rest_M1 = (index_M >= ends_E[-1])[:, None]

    def dispatch(self, x_ND: Tensor) -> Tensor:
        """The rows [R, D]."""
        if self._places is None:
            return x_ND.index_select(0, self.order // self._k)
        rows_MD: Tensor = _Dispatch.apply(x_ND, self.order, self._places, self._k)
        return self.zero_undefined(rows_MD)

    def zero_undefined(self, rows_RD: Tensor) -> Tensor:
        """The rows that experts made, and gradients of those that they were given, 0 where no expert made any."""
        return rows_RD if self._is_rest_M1 is None else rows_RD.masked_fill(self._is_rest_M1, 0)

    def combine(self, rows_RD: Tensor, n: int) -> Tensor:
        """[N, D]: of each token the rows of its choices."""
        if self._places is None:
            made_ND = rows_RD.new_zeros(n, rows_RD.shape[1])
            return made_ND.index_add(0, self.order // self._k, rows_RD)
        return rows_RD.index_select(0, self._places).unflatten(0, (n, self._k)).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, order_M, places_M, k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places_M)
        ctx.k = k
        return x_ND.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx, gradient_MD):  # type: ignore[no-untyped-def]
        (places_M,) = ctx.saved_tensors
        return gradient_MD.index_select(0, places_M).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


log = logging.getLogger("megatfm")

CAUSAL = ("decoder", "encoder_decoder")
"""Families with a stack in which no token may depend on a later one."""


class Experts(nn.Module):
    """Σₖ weightₖ FFNₑ₍ₖ₎(x) over the experts that are reached from here.

    groups: into how many, one after the other, experts are divided; of each group those from number `first` on are
    reached, as many as are here.
    """

    tp_plan = (
        ("", "expert_parallel"),
        ("gathered", "gather_expert_input"),
        ("gather_row", "gather_choices"),
        ("split_row", "split_choices"),
        ("taken", "split_kept_choices"),
        ("summed", "reduce_expert_output"),
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
            has_bias = name in biases and (activation.gated or name != "b_gate")
            self.register_parameter(name, nn.Parameter(torch.empty(n, biases[name])) if has_bias else None)
            if has_bias:
                self.initial[name] = Constant(0.0)
        self.roles = {name: "vector" if name in biases else "matrices" for name in self.initial}
        self.down_bias_scale = 1.0  # of the last bias, if other ranks add the rest
        # Seams at which ranks that share the experts gather tokens, and reduce the sums.
        self.gathered, self.taken, self.summed = nn.Identity(), nn.Identity(), nn.Identity()
        # Seams at which ranks that share a row gather its choices, and take their part of the result.
        self.gather_row, self.split_row = RowSeam(), RowSeam()

    def cost(self, tokens: TokenCounts) -> Cost:
        """A token meets those experts that it chooses."""
        n_expert_parameters = sum(parameter[0].numel() for parameter in self.parameters())
        matrices = sum(parameter[0].numel() for parameter in self.parameters() if parameter.dim() > 2)
        return Cost(
            matmul_macs=self.top_k * matrices * tokens.n,
            vector_macs=self.top_k * (n_expert_parameters - matrices) * tokens.n,
            inactive_parameters=(self.n_experts - self.top_k) * n_expert_parameters,
        )

    @property
    def has_capacity(self) -> bool:
        """Whether the number of a row's tokens that an expert takes is limited."""
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

        overlap_with: work to do while rows are in transfer; only where they do.
        """
        x_BTD, weights_BTK, choices_BTK = map(self.gathered, (x_BTD, weights_BTK, choices_BTK))
        taken_BTK = choices_BTK < self.n_experts
        if self.has_capacity:
            of_row_BSK = self.gather_row(choices_BTK, sequence)
            places = self.places or expert_capacity(of_row_BSK, self.n_experts, self.capacity or 1.0)
            taken_BSK = within_capacity(of_row_BSK, self.n_experts, places, by_position=self.by_position)
            taken_BTK = taken_BTK & self.split_row(taken_BSK, sequence)
        reached_M = self._reached(choices_BTK.where(taken_BTK, self.n_experts).flatten())
        order_M, offs_E = sort_by_expert(reached_M, self.ep_size * len(self.w_up))
        rows = SortedRows(order_M, offs_E, choices_BTK.shape[-1])
        x_ND = x_BTD.flatten(0, 1)
        extra_arguments = () if overlap_with is None else (overlap_with,)
        made_RD = rows.zero_undefined(self.run_experts(rows.dispatch(x_ND), offs_E, *extra_arguments))
        made_RD = made_RD * weights_BTK.flatten().index_select(0, rows.order)[:, None]
        return self.summed(rows.combine(made_RD, len(x_ND)).view_as(x_BTD)), self.taken(taken_BTK)

    def _reached(self, choices_M: Tensor) -> Tensor:
        """The places of choices among the experts that are reached; −1, or one too large, for others."""
        group_experts, local_experts = self.n_experts // self.ep_size, len(self.w_up)
        within_M = choices_M % group_experts - self.first
        places_M = choices_M // group_experts * local_experts + within_M
        return places_M.where((within_M >= 0) & (within_M < local_experts), -1)

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
