"""SOAP (Vyas et al. 2024, algorithm 3): Adam in the eigenbasis of Shampoo's covariances.

A file of our own: libraries keep its bases in nested lists, which a checkpoint of tensors can't take up again.
"""

from typing import Any

import torch
from torch import Tensor

from megatfm.config import SoapConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.train.optimizers.adamw import adamw
from megatfm.train.optimizers.groups import lr_scales, split_block_matrices, weight_decays
from megatfm.train.optimizers.registry import OPTIMIZERS, Parameters

SIDES = {"left": -2, "right": -1}
"""The dims of a matrix, or of those in a stack."""


@OPTIMIZERS.register("soap")
def soap(config: SoapConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """SOAP for matrices inside `layers`, AdamW for embedding, head and vectors."""

    def make(groups: list[dict[str, Any]]) -> Soap:
        return Soap(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, every=config.precondition_frequency
        )

    matrices, rest = split_block_matrices(parameters)
    decays = weight_decays(matrices, config.weight_decay)
    options = {
        name: {**decays[name], "rotated": tuple(size <= config.max_precond_dim for size in p.shape[-2:])}
        for name, p in matrices.items()
    }
    names, rates = list(matrices), lr_scales(matrices)
    group = OptimizerGroup(names, "whole_tensor", make, options, rates, counters=("step",))
    return [group, *adamw(config, rest)]


class Soap(torch.optim.Optimizer):
    """For each matrix W [m, n], or all of a stack [E, m, n] at once: Adam on QₗᵀGQᵣ, where Qₗ and Qᵣ follow the
    eigenvectors of E[GGᵀ] and E[GᵀG].

    rotated: for each side whether it is; a side that isn't has the identity for its basis. The first step only
    measures, as the authors' code does it; every so many steps the bases are brought up to date by one step of
    orthogonal iteration.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, every: int) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "every": every, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "rotated": (True, True), "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            sides = [side for side, rotated in zip(SIDES, group["rotated"], strict=True) if rotated]
            for weight in group["params"]:
                if self.state[weight]:
                    self._move(weight, group)
                    self._measure(weight, group, sides)
                    if (group["step"] - 1) % group["every"] == 0:
                        self._turn(self.state[weight], sides)
                else:
                    self._start(weight, group, sides)

    def _start(self, weight: Tensor, group: dict[str, Any], sides: list[str]) -> None:
        state = self.state[weight]
        state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        for side in sides:
            size = weight.shape[SIDES[side]]
            state[side] = weight.new_zeros(*weight.shape[:-2], size, size)
        self._measure(weight, group, sides)
        for side in sides:
            state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1].flip(-1)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), step = self.state[weight], group["betas"], group["step"] - 1
        assert weight.grad is not None
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(_rotate(weight.grad, state).square_(), 1 - beta2)
        update = _rotate(state["exp_avg"], state) / state["exp_avg_sq"].sqrt().add_(group["eps"])
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        weight.add_(_rotate(update, state, _project=True), alpha=-group["lr"] * correction)
        weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _measure(self, weight: Tensor, group: dict[str, Any], sides: list[str]) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        for side in sides:
            product = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
            state[side].lerp_(product, 1 - group["betas"][1])

    def _turn(self, state: dict[str, Tensor], sides: list[str]) -> None:
        """One step of orthogonal iteration; the second moments move along when eigenvalues change their order."""
        for side in sides:
            basis, product = state[f"{side}_basis"], state[side] @ state[f"{side}_basis"]
            order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
            rows_or_columns = order[..., :, None] if side == "left" else order[..., None, :]
            moments = state["exp_avg_sq"]
            state["exp_avg_sq"] = moments.gather(SIDES[side], rows_or_columns.expand_as(moments))
            ordered = product.gather(-1, order[..., None, :].expand_as(product))
            state[f"{side}_basis"] = torch.linalg.qr(ordered)[0]


def _rotate(matrix: Tensor, state: dict[str, Tensor], *, _project: bool = False) -> Tensor:
    """QₗᵀMQᵣ, or back: QₗMQᵣᵀ."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if _project else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if _project else right)
    return matrix.clone() if left is None and right is None else matrix
