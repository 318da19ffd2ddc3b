"""Muon (Jordan et al. 2024) for stacks of matrices, such as those of experts, as torch's moves a single one."""

from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, and how many steps of it: those of torch and of the authors."""
STEPS, EPS = 5, 1e-7


class StackedMuon(torch.optim.Optimizer):
    """For stacks [E, m, n]: each of the E matrices is orthogonalised by itself, all of them in the same products."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                average = self.state[weight]["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update_Emn = orthogonalised(weight.grad.lerp(average, momentum))
                weight.mul_(1 - lr * group["weight_decay"])
                rows, columns = weight.shape[1:]
                weight.add_(update_Emn, alpha=-lr * max(1, rows / columns) ** 0.5)


def orthogonalised(stack_Emn: Tensor) -> Tensor:
    """USVᵀ → about UVᵀ for each matrix of a stack, in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = stack_Emn.shape[1] > stack_Emn.shape[2]
    x = stack_Emn.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # so that no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
