"""Experts: feed-forward networks with stacked weights, and the dispatch of tokens to them."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.layers.initialisation import Constant, Initialiser, Uniform
from megatfm.layers.moe.routers import RowRedistribution
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.moe import RowBags, choose_grouped_kernel, grouped_linear, spread_rows, sum_bags
from megatfm.ops.torch_private import is_fake
from megatfm.terminal import log_once

# B batch, T tokens, N = B · T, K chosen experts, M = N · K choices, R choices of local experts, D model width
# In grouped products: E experts, I input width, O output width, r rank of an adapter


def expert_capacity(choices_BTK: Tensor, n_experts: int, factor: float) -> int:
    """Return ⌈factor · T · K / n_experts⌉. In floating point, factor 1.1, 100 tokens and 10 experts give 12."""
    return math.ceil(factor * choices_BTK.shape[1] * choices_BTK.shape[2] / n_experts)


def find_within_capacity(choices_BTK: Tensor, n_experts: int, capacity: int, *, by_position: bool = False) -> Tensor:
    """Return boolean [B, T, K], the choices within each expert's capacity (a number of choices a row).

    Experts take all first choices in token order, then all second choices, … (Lepikhin et al. 2021, algorithm 1).
    by_position: all choices of a token before those of the next (Megatron-LM's drop policy "position"), so that a
    token does not depend on later ones. Rows are independent. Choices of expert `n_experts` (none) return true.
    """
    B, T, K = choices_BTK.shape
    ordered_BXX = choices_BTK if by_position else choices_BTK.transpose(1, 2)
    ordered_BM = ordered_BXX.reshape(B, K * T)
    order_BM = ordered_BM.argsort(dim=1, stable=True)
    sorted_BM = ordered_BM.gather(1, order_BM)
    first_BM = torch.searchsorted(sorted_BM, sorted_BM)  # index of the expert's first choice
    slot_BM = torch.arange(K * T, device=choices_BTK.device) - first_BM
    is_within_BM = torch.zeros_like(ordered_BM, dtype=torch.bool)
    is_within_BM.scatter_(1, order_BM, (slot_BM < capacity) | (sorted_BM == n_experts))
    return is_within_BM.view(B, T, K) if by_position else is_within_BM.view(B, K, T).transpose(1, 2)


def sort_by_expert(choices_M: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Return the stable order [M] of choices by expert, and the end of each expert's range in it, int32 [n_experts].

    Choices outside 0 … n_experts − 1 come last.
    """
    expert_M = choices_M.where((choices_M >= 0) & (choices_M < n_experts), n_experts)
    sorted_M, order_M = expert_M.sort(stable=True)
    experts_E = torch.arange(n_experts, device=choices_M.device)
    return order_M, torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)


def is_host_readable(tensor: Tensor) -> bool:
    """Return whether the host can read the tensor without waiting for a GPU."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


class SortedRows:
    """Dispatch of token vectors to rows sorted by expert, and the weighted combination back to tokens.

    order: int64 [M], ends: int32 [E], from `sort_by_expert`. Experts leave the outputs and gradients of choices beyond
    the last end undefined, unless they are `padded` with zeros. On a CPU these rows are cut off (R < M). On a GPU, the
    first row is read in their place, with weight 0, because the host does not know R. Sums go by token there, in one
    kernel each: scatter-adds on GPUs are not deterministic.

    ends: those that experts get. The first row is always defined on a GPU.
    """

    def __init__(self, order_M: Tensor, ends_E: Tensor, top_k: int, *, padded: bool = False) -> None:
        self.order, self.ends, self._k = order_M, ends_E, top_k
        self._bags: RowBags | None = None
        self._is_defined_M: Tensor | None = None
        if is_host_readable(order_M):
            self.order = order_M[: int(ends_E[-1])]
            return
        index_M = torch.arange(len(order_M), device=order_M.device)
        sorted_position_M = torch.empty_like(order_M).scatter_(0, order_M, index_M)
        if not padded:
            self._is_defined_M = sorted_position_M < ends_E[-1]
            sorted_position_M = sorted_position_M.where(self._is_defined_M, 0)
            self.ends = ends_E.where(ends_E[-1] > 0, 1)
        starts_N = torch.arange(0, len(order_M), top_k, device=order_M.device)
        self._bags = RowBags(sorted_position_M, starts_N, order_M, order_M // top_k)

    def dispatch(self, x_ND: Tensor) -> Tensor:
        """Return the tokens' vectors in the order of experts, [R, D]."""
        if self._bags is None:
            return x_ND.index_select(0, self.order // self._k)
        weights_M = None if self._is_defined_M is None else self._is_defined_M.to(x_ND.dtype)
        return spread_rows(x_ND, self._bags, weights_M)

    def combine(self, rows_RD: Tensor, weights_M: Tensor) -> Tensor:
        """Sum the rows of each token's choices, times their weights, [N, D]."""
        if self._bags is None:
            weighted_RD = rows_RD * weights_M.index_select(0, self.order)[:, None]
            sums_ND = weighted_RD.new_zeros(len(weights_M) // self._k, rows_RD.shape[1])
            return sums_ND.index_add(0, self.order // self._k, weighted_RD)
        if self._is_defined_M is not None:
            weights_M = weights_M.where(self._is_defined_M, 0)
        return sum_bags(rows_RD, self._bags, weights_M)


CAUSAL = ("decoder", "encoder_decoder")
"""Families with a stack in which no token may depend on a later one."""


class Experts(nn.Module):
    """Σₖ weightₖ FFNₑ₍ₖ₎(x) over the experts that this rank reaches.

    Experts are divided into `ep_size` consecutive groups, one for each expert-parallel rank. With tensor parallelism by
    expert, a rank reaches the experts `first`, first + 1, … of each group, as many as it has weights.
    """

    tp_plan = (
        ("", "expert_parallel"),
        ("gather_input", "gather_expert_input"),
        ("gather_row", "gather_choices"),
        ("split_row", "split_choices"),
        ("split_kept", "split_kept_choices"),
        ("reduce_output", "reduce_expert_output"),
    )

    is_compiled = False
    """False: a block is compiled without its experts. torch compiles grouped products in bfloat16 only, and
    data-dependent numbers of rows would trigger recompilation."""

    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        activation, n, d, d_ff = ACTIVATIONS.get(options.activation), options.n_experts, config.d_model, options.d_ff
        self.activation, self.n_experts, self.first = activation, n, 0
        self.capacity_factor, self.fixed_capacity = options.capacity_factor, options.expert_capacity
        self.by_position, self.is_unlimited = options.drop_policy == "position", False
        if options.has_capacity and options.top_k > 1 and not self.by_position and config.family in CAUSAL:
            log_once(
                f"model.ffn.capacity_factor with top_k = {options.top_k} in a causal model lets later tokens of a row "
                "decide which of a token's last choices are dropped, and generation does not have these tokens: set "
                'model.ffn.drop_policy = "position"',
                logging.WARNING,
            )
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
        self.down_bias_scale = 1.0  # below 1 if several tensor-parallel ranks add the bias
        self.lora_scale = 1.0
        # Expert and tensor parallelism gather tokens, drop masks and outputs here.
        self.gather_input, self.split_kept, self.reduce_output = nn.Identity(), nn.Identity(), nn.Identity()
        # Ranks that share a row gather its choices, and take their part of the result, here.
        self.gather_row, self.split_row = RowRedistribution(), RowRedistribution()

    def add_lora(self, key: str, rank: int, scale: float) -> None:
        """Give each expert a low-rank adapter beside its matrix in the stack `key`: Wₑ x + scale · Bₑ Aₑ x.

        Adds the parameters `{key}_lora_a` [experts, rank, d_in] and `{key}_lora_b` [experts, d_out, rank]. They are not
        in a module of their own, because engines gather and divide the tensors of experts together.
        """
        n, d_out, d_in = self.get_parameter(key).shape
        a, b = f"{key}_lora_a", f"{key}_lora_b"
        self.register_parameter(a, nn.Parameter(torch.empty(n, rank, d_in)))
        self.register_parameter(b, nn.Parameter(torch.empty(n, d_out, rank)))
        self.initial |= {a: Uniform(d_in**-0.5), b: Constant(0.0)}
        self.roles |= {a: "matrices", b: "matrices"}
        self.lora_scale = scale

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of `top_k` experts for each token."""
        n_expert_parameters = sum(parameter[0].numel() for parameter in self.parameters())
        matrices = sum(parameter[0].numel() for parameter in self.parameters() if parameter.dim() > 2)
        return Cost(
            matmul_macs=self.top_k * matrices * tokens.n,
            vector_macs=self.top_k * (n_expert_parameters - matrices) * tokens.n,
            inactive_parameters=(self.n_experts - self.top_k) * n_expert_parameters,
        )

    @property
    def matrix_names(self) -> list[str]:
        """Names of the stacked matrices, which adapters may go beside."""
        return [key for key in ("w_gate", "w_up", "w_down") if getattr(self, key) is not None]

    @property
    def has_capacity(self) -> bool:
        """Whether the number of choices that an expert takes from a row is limited."""
        return (self.capacity_factor is not None or self.fixed_capacity is not None) and not self.is_unlimited

    def forward(
        self,
        x_BTD: Tensor,
        weights_BTK: Tensor,
        choices_BTK: Tensor,
        sequence: SequenceMetadata,
        overlap_with: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, T, D], and boolean [B, T, K], the choices within capacity. A choice of `n_experts` means none.

        overlap_with: a function to run during the all-to-all of expert parallelism.
        """
        x_BTD, weights_BTK, choices_BTK = map(self.gather_input, (x_BTD, weights_BTK, choices_BTK))
        is_within_BTK = choices_BTK < self.n_experts
        if self.has_capacity:
            full_choices_BSK = self.gather_row(choices_BTK, sequence)
            capacity = self.fixed_capacity or expert_capacity(
                full_choices_BSK, self.n_experts, self.capacity_factor or 1.0
            )
            is_within_BSK = find_within_capacity(
                full_choices_BSK, self.n_experts, capacity, by_position=self.by_position
            )
            is_within_BTK = is_within_BTK & self.split_row(is_within_BSK, sequence)
        local_choices_M = self._index_local_experts(choices_BTK.where(is_within_BTK, self.n_experts).flatten())
        order_M, ends_E = sort_by_expert(local_choices_M, self.ep_size * len(self.w_up))
        # Expert parallelism returns zeros for rows that no expert gets, and gives them no gradient.
        rows = SortedRows(order_M, ends_E, choices_BTK.shape[-1], padded=self.ep_size > 1)
        x_ND = x_BTD.flatten(0, 1)
        overlap_arguments = () if overlap_with is None else (overlap_with,)
        outputs_RD = self.run_experts(rows.dispatch(x_ND), rows.ends, *overlap_arguments)
        y_ND = rows.combine(outputs_RD, weights_BTK.flatten())
        return self.reduce_output(y_ND.view_as(x_BTD)), self.split_kept(is_within_BTK)

    def _index_local_experts(self, choices_M: Tensor) -> Tensor:
        """Return the index of each choice among the experts that this rank reaches; −1 for other experts, or beyond."""
        group_experts, local_experts = self.n_experts // self.ep_size, len(self.w_up)
        within_M = choices_M % group_experts - self.first
        sorted_position_M = choices_M // group_experts * local_experts + within_M
        return sorted_position_M.where((within_M >= 0) & (within_M < local_experts), -1)

    def run_experts(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Apply FFNₑ to rows sorted by expert. ends_E: end of each expert's rows; later rows are undefined."""
        kernel = choose_grouped_kernel(rows_MD, self.w_up)
        log_once(f"experts on {rows_MD.device.type} in {str(rows_MD.dtype)[6:]} run in kernel {kernel}")
        inner_MF = self._apply_grouped_linear(rows_MD, "w_up", self.b_up, ends_E)
        if self.w_gate is None:
            inner_MF = self.activation.function(inner_MF)
        else:
            inner_MF = self.activation(self._apply_grouped_linear(rows_MD, "w_gate", self.b_gate, ends_E), inner_MF)
        b_down = self.b_down if self.b_down is None or self.down_bias_scale == 1 else self.b_down * self.down_bias_scale
        return self._apply_grouped_linear(inner_MF, "w_down", b_down, ends_E)

    def _apply_grouped_linear(self, rows_MI: Tensor, key: str, bias_EO: Tensor | None, ends_E: Tensor) -> Tensor:
        outputs_MO = grouped_linear(rows_MI, getattr(self, key), ends_E)
        if (a_ErI := getattr(self, f"{key}_lora_a", None)) is not None:
            low_rank_Mr = grouped_linear(rows_MI, a_ErI, ends_E)
            update_MO = grouped_linear(low_rank_Mr, getattr(self, f"{key}_lora_b"), ends_E)
            outputs_MO = outputs_MO + update_MO * self.lora_scale
        if bias_EO is None:
            return outputs_MO
        sorted_position_M = torch.arange(len(rows_MI), device=rows_MI.device, dtype=ends_E.dtype)
        experts_M = torch.searchsorted(ends_E, sorted_position_M, right=True)
        is_undefined_M1 = (experts_M == len(bias_EO))[:, None]
        biases_MO = bias_EO[experts_M.clamp(max=len(bias_EO) - 1)]
        return outputs_MO + biases_MO.masked_fill(is_undefined_M1, 0)  # gradients there are undefined too


@contextmanager
def without_capacity(model: nn.Module) -> Iterator[None]:
    """Disable the experts' capacity, for generation.

    Capacity depends on the row's length. In generation, rows grow by a token a step, so results would depend on how
    far generation has come.
    """
    limited = [module for module in model.modules() if isinstance(module, Experts) and module.has_capacity]
    if limited:
        log_once(
            "generation lets experts take all tokens that choose them: model.ffn.capacity_factor limits training and "
            "evaluation only"
        )
    for experts in limited:
        experts.is_unlimited = True
    try:
        yield
    finally:
        for experts in limited:
            experts.is_unlimited = False
