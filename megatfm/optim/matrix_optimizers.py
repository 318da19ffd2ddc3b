"""Optimizers for the matrices of blocks: Muon and SOAP. AdamW updates embeddings, head and vectors.

SOAP is implemented here because libraries keep its bases in nested lists, which tensor checkpoints can't restore.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from megatfm.config import MuonConfig, SoapConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.optim.optimizers import adamw
from megatfm.optim.parameters import (
    OPTIMIZERS,
    Parameters,
    compute_lr_scales,
    list_stacked_names,
    make_weight_decay_options,
    split_block_matrices,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton–Schulz iteration, as in torch and the authors' code; so are STEPS and EPS."""
STEPS, EPS = 5, 1e-7
MAX_BATCH_ELEMENTS = 2**26
"""Elements of matrices in one batched product: 128 MiB in bfloat16, plus temporaries of a few times that size."""
SIDES = {"left": -2, "right": -1}
"""The dim that each side of a matrix (or stack of matrices) preconditions."""

Update = tuple[Tensor, Tensor, float]
"""A weight, its update before orthogonalisation, and the step size."""


@OPTIMIZERS.register("muon")
def muon(config: MuonConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Muon for the blocks' matrices, AdamW for embedding, head and vectors.

    Matrices of experts, and on GPUs all matrices of one shape, are orthogonalised in batches.
    """
    in_bf16 = config.newton_schulz_dtype == "bf16"
    build_batched = partial(BatchedMuon, lr=config.matrix_lr, momentum=config.momentum, in_bf16=in_bf16)

    def build(groups: list[dict[str, Any]]) -> Optimizer:
        if groups[0]["params"][0].device.type != "cpu" or config.newton_schulz_dtype == "param":
            return build_batched(groups)
        return Muon(groups, lr=config.matrix_lr, momentum=config.momentum)

    matrices, remaining = split_block_matrices(parameters)
    options = make_weight_decay_options(matrices, config.weight_decay)
    rates = compute_lr_scales(matrices, config.matrix_lr / config.lr)
    stacked = list_stacked_names(matrices)
    groups = [
        OptimizerGroup([name for name in matrices if name not in stacked], "whole_tensor", build, options, rates),
        OptimizerGroup([name for name in matrices if name in stacked], "whole_tensor", build_batched, options, rates),
    ]
    return [*groups, *adamw(config, remaining)]


class BatchedMuon(torch.optim.Optimizer):
    """Muon for matrices [m, n] and stacks [E, m, n], whose matrices are orthogonalised separately.

    Matrices of one shape share batched products; on a CPU only those of a stack, since larger batches are slower there.
    """

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
            directions = torch._foreach_lerp(gradients, averages, momentum)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            for weight, direction in zip(weights, directions, strict=True):
                rows, columns = shape = weight.shape[-2:]
                by_shape[shape].append((weight, direction, -lr * max(1, rows / columns) ** 0.5))
        for updates in by_shape.values():
            limit = 1 if updates[0][0].device.type == "cpu" else MAX_BATCH_ELEMENTS
            for batch in split_batches(updates, limit):
                apply_updates(batch, in_bf16=self._in_bf16)


def split_batches(updates: Sequence[Update], limit: int) -> Iterator[list[Update]]:
    """Yield consecutive updates in batches of at most `limit` elements, at least one update each."""
    batch: list[Update] = []
    for update in updates:
        if batch and sum(weight.numel() for weight, _, _ in [*batch, update]) > limit:
            yield batch
            batch = []
        batch.append(update)
    if batch:
        yield batch


def apply_updates(batch: Sequence[Update], *, in_bf16: bool = True) -> None:
    """Orthogonalise the updates, whose matrices have one shape, and apply them to the weights."""
    stacks = [update.view(-1, *update.shape[-2:]) for _, update, _ in batch]
    orthogonal_Emn = newton_schulz(torch.cat(stacks) if len(stacks) > 1 else stacks[0], in_bf16=in_bf16)
    orthogonal_stacks = orthogonal_Emn.to(batch[0][0].dtype).split([len(stack) for stack in stacks])
    for step_size, pairs in groupby(zip(batch, orthogonal_stacks, strict=True), key=lambda pair: pair[0][2]):
        weights, directions = zip(
            *((weight, direction.view_as(weight)) for (weight, _, _), direction in pairs), strict=True
        )
        torch._foreach_add_(weights, directions, alpha=step_size)


def newton_schulz(stack_Emn: Tensor, *, in_bf16: bool = True) -> Tensor:
    """Approximate UVᵀ of each matrix USVᵀ in a stack, in bfloat16 or in the stack's dtype."""
    a, b, c = COEFFICIENTS
    is_tall = stack_Emn.shape[1] > stack_Emn.shape[2]
    x = stack_Emn.bfloat16() if in_bf16 else stack_Emn
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # so that no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@OPTIMIZERS.register("soap")
def soap(config: SoapConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """SOAP for the blocks' matrices, AdamW for embedding, head and vectors."""
    build = partial(Soap, lr=config.lr, betas=config.betas, eps=config.eps, update_every=config.precondition_frequency)
    matrices, remaining = split_block_matrices(parameters)
    decays = make_weight_decay_options(matrices, config.weight_decay)
    options = {
        name: {**decays[name], "rotated": tuple(size <= config.max_precond_dim for size in p.shape[-2:])}
        for name, p in matrices.items()
    }
    names, rates = list(matrices), compute_lr_scales(matrices)
    group = OptimizerGroup(names, "whole_tensor", build, options, rates, counters=("step",))
    return [group, *adamw(config, remaining)]


class Soap(torch.optim.Optimizer):
    """SOAP (Vyas et al. 2024): Adam on QₗᵀGQᵣ, where Qₗ and Qᵣ track the eigenvectors of E[GGᵀ] and E[GᵀG].

    For matrices [m, n] and stacks [E, m, n]. rotated: whether each side is rotated; otherwise its basis is I.
    The first step only initialises the statistics, as in the authors' code. Every `update_every` steps, the bases are
    updated by one step of orthogonal iteration.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, update_every: int) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "every": update_every, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "rotated": (True, True), "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            sides = [side for side, rotated in zip(SIDES, group["rotated"], strict=True) if rotated]
            for weight in group["params"]:
                if self.state[weight]:
                    self._update_weight(weight, group)
                    self._update_covariances(weight, group, sides)
                    if (group["step"] - 1) % group["every"] == 0:
                        self._update_bases(self.state[weight], sides)
                else:
                    self._init_state(weight, group, sides)

    def _init_state(self, weight: Tensor, group: dict[str, Any], sides: list[str]) -> None:
        state = self.state[weight]
        state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        for side in sides:
            size = weight.shape[SIDES[side]]
            state[side] = weight.new_zeros(*weight.shape[:-2], size, size)
        self._update_covariances(weight, group, sides)
        for side in sides:
            state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1].flip(-1)

    def _update_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), step = self.state[weight], group["betas"], group["step"] - 1
        assert weight.grad is not None
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(_project(weight.grad, state).square_(), 1 - beta2)
        update = _project(state["exp_avg"], state) / state["exp_avg_sq"].sqrt().add_(group["eps"])
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        weight.add_(_project(update, state, inverse=True), alpha=-group["lr"] * correction)
        weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _update_covariances(self, weight: Tensor, group: dict[str, Any], sides: list[str]) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        for side in sides:
            product = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
            state[side].lerp_(product, 1 - group["betas"][1])

    def _update_bases(self, state: dict[str, Tensor], sides: list[str]) -> None:
        """Run one step of orthogonal iteration; second moments are reordered with the eigenvalues."""
        for side in sides:
            basis, product = state[f"{side}_basis"], state[side] @ state[f"{side}_basis"]
            order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
            rows_or_columns = order[..., :, None] if side == "left" else order[..., None, :]
            moments = state["exp_avg_sq"]
            state["exp_avg_sq"] = moments.gather(SIDES[side], rows_or_columns.expand_as(moments))
            ordered = product.gather(-1, order[..., None, :].expand_as(product))
            state[f"{side}_basis"] = torch.linalg.qr(ordered)[0]


def _project(matrix: Tensor, state: dict[str, Tensor], *, inverse: bool = False) -> Tensor:
    """Return QₗᵀMQᵣ; inverse: QₗMQᵣᵀ."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if inverse else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if inverse else right)
    return matrix.clone() if left is None and right is None else matrix
