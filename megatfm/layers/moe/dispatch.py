"""Which rows go to which experts: sorted by expert, and with a capacity the first of them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# B batch, T tokens, K chosen experts, M = B · T · K choices


def even_share(choices_BTK: Tensor, n_experts: int, factor: float) -> int:
    """⌈factor · T · K / experts⌉."""
    return math.ceil(factor * choices_BTK.shape[1] * choices_BTK.shape[2] / n_experts)


def within_capacity(choices_BTK: Tensor, n_experts: int, capacity: int) -> Tensor:
    """Boolean [B, T, K]: the choices of each row that its experts still take, so many each.

    First all first choices in the order of the tokens, then all second ones, … (Lepikhin et al. 2021, algorithm 1). A
    row's choices depend on no other row's. Choices of `n_experts`, that is of none, are taken.
    """
    B, T, K = choices_BTK.shape
    in_turn_BM = choices_BTK.transpose(1, 2).reshape(B, K * T)
    order_BM = in_turn_BM.argsort(dim=1, stable=True)
    sorted_BM = in_turn_BM.gather(1, order_BM)
    first_BM = torch.searchsorted(sorted_BM, sorted_BM)  # where the expert's choices begin
    places_BM = torch.arange(K * T, device=choices_BTK.device) - first_BM
    taken_BM = torch.zeros_like(in_turn_BM, dtype=torch.bool)
    taken_BM.scatter_(1, order_BM, (places_BM < capacity) | (sorted_BM == n_experts))
    return taken_BM.view(B, K, T).transpose(1, 2)


def by_expert(choices_M: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """The order [M] of choices by expert, and where in it each expert's end, int32 [n_experts].

    Other choices than 0 to n_experts − 1 come last. Choices of one expert stay in their order.
    """
    known_M = choices_M.where((choices_M >= 0) & (choices_M < n_experts), n_experts)
    sorted_M, order_M = known_M.sort(stable=True)
    experts_E = torch.arange(n_experts, device=choices_M.device)
    return order_M, torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)


def asks_for_values(tensor: Tensor) -> bool:
    """Whether the host may look into it: a GPU would have to be waited for."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def without_rest(order_M: Tensor, ends_E: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The order of choices that are some expert's, and what is to be done with rows in that order [R, D], before and
    after the experts.

    What experts make of the rest is undefined, and so are its gradients: it is cut off, or its rows are set to 0.
    """
    if asks_for_values(order_M):
        return order_M[: int(ends_E[-1])], lambda rows_RD: rows_RD
    is_rest_M1 = (torch.arange(len(order_M), device=order_M.device) >= ends_E[-1])[:, None]
    return order_M, lambda rows_MD: rows_MD.masked_fill(is_rest_M1, 0)
