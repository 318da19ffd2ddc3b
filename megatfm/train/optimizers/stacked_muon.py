"""Muon (Jordan et al. 2024) for several matrices at once, as torch's moves a single one: experts', and on GPUs all of a
shape. One after another, they take longer to ask for than to compute."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, and how many steps of it: those of torch and of the authors."""
STEPS, EPS = 5, 1e-7


BATCH = 2**26
"""Elements of matrices that are moved by the same products: in bfloat16 128 MiB, with some times as much besides."""

Update = tuple[Tensor, Tensor, float]
"""A weight, what it is moved along before that is orthogonalised, and how far."""


class BatchedMuon(torch.optim.Optimizer):
    """For matrices [m, n] and stacks of them [E, m, n], of which each is orthogonalised by itself, all of one shape in
    the same products. On a CPU only those of a stack: there more of them in one product take longer."""

    def __init__(self, params: Any, lr: float, momentum: float, *, in_bf16: bool = True) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self._in_bf16 = in_bf16

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        by_shape: defaultdict[torch.Size, list[Update]] = defaultdict(list)
        for group in self.param_groups:
            lr, momentum, weights = group["lr"], group["momentum"], group["params"]
            for weight in weights:
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            averages = [self.state[weight]["momentum_buffer"] for weight in weights]
            gradients = [weight.grad for weight in weights]
            torch._foreach_lerp_(averages, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, averages, momentum)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            for weight, update in zip(weights, updates, strict=True):
                rows, columns = shape = weight.shape[-2:]
                by_shape[shape].append((weight, update, -lr * max(1, rows / columns) ** 0.5))
        for moves in by_shape.values():
            limit = 1 if moves[0][0].device.type == "cpu" else BATCH
            for batch in split_batches(moves, limit):
                apply_updates(batch, in_bf16=self._in_bf16)


def split_batches(moves: Sequence[Update], limit: int) -> Iterator[list[Update]]:
    """One after another, as many at once as have so many elements; at least one."""
    batch: list[Update] = []
    for each in moves:
        if batch and sum(weight.numel() for weight, _, _ in [*batch, each]) > limit:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def apply_updates(batch: Sequence[Update], *, in_bf16: bool = True) -> None:
    """Orthogonalise, and move the weights, which have matrices of one shape."""
    stacks = [update.view(-1, *update.shape[-2:]) for _, update, _ in batch]
    orthogonal_Emn = newton_schulz(torch.cat(stacks) if len(stacks) > 1 else stacks[0], in_bf16=in_bf16)
    parts = orthogonal_Emn.to(batch[0][0].dtype).split([len(stack) for stack in stacks])
    for by, several in groupby(zip(batch, parts, strict=True), key=lambda pair: pair[0][2]):
        weights, moved = zip(
            *((weight, part.view_as(weight)) for (weight, _, _), part in several), strict=True
        )
        torch._foreach_add_(weights, moved, alpha=by)


def newton_schulz(stack_Emn: Tensor, *, in_bf16: bool = True) -> Tensor:
    """USVᵀ → about UVᵀ for each matrix of a stack, in bfloat16 or in the stack's own type."""
    a, b, c = COEFFICIENTS
    is_tall = stack_Emn.shape[1] > stack_Emn.shape[2]
    x = stack_Emn.bfloat16() if in_bf16 else stack_Emn
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # so that no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
