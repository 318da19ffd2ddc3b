"""Which rows go to which experts: sorted by expert, and with a capacity the first of them."""

import math

import torch
from torch import Tensor

from megatfm.ops.torch_private import is_fake

# B batch, T tokens, N = B · T, K chosen experts, M = N · K choices, R of them that are some expert's, D model width


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


class Rows:
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
        """The rows that experts made, and gradients of those that they were given, 0 where nobody made any."""
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
