"""Optimizers for parameters of any shape: AdamW, schedule-free AdamW, Adafactor, LAMB and Lion.

LAMB and Lion are implemented here: library LAMBs differ from the paper in decay and clamping, and libraries with Lion
take seconds to import.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw as torch_adamw

from megatfm import rng
from megatfm.config import AdafactorConfig, AdamWConfig, LambConfig, LionConfig, ScheduleFreeConfig
from megatfm.engines.interface import OptimizerGroup, ShardLocation
from megatfm.ops.cross_entropy import has_triton
from megatfm.ops.keyed_random import hash_elements, stochastic_round
from megatfm.ops.torch_private import is_fake
from megatfm.optim.parameters import (
    OPTIMIZERS,
    Parameters,
    compute_lr_scales,
    list_stacked_names,
    make_weight_decay_options,
)

CHUNK_ELEMENTS = 2**24
"""Elements whose moments are converted to full precision at a time, which bounds temporary memory."""
ADAFACTOR_EPS1_ROOT = 1e-15
"""torch clamps second moments at the square of this, 1e-30, the paper's ε₁. torch's default would change results."""


@OPTIMIZERS.register("adamw")
def adamw(config: AdamWConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """AdamW (Loshchilov & Hutter 2019), from torch; weight decay depends on the parameter's role."""
    options, rates = make_weight_decay_options(parameters, config.weight_decay), compute_lr_scales(parameters)
    names = list(parameters)
    arguments: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.moments_dtype == "bf16":
        build_bf16 = partial(BF16StateAdamW, **arguments)
        group = OptimizerGroup(names, "elementwise", build_bf16, options, rates, ("step",), state_dtype=torch.bfloat16)
    else:
        group = OptimizerGroup(names, "elementwise", partial(AdamW, **arguments, fused=True), options, rates)
    return [group]


@dataclass(frozen=True)
class ShardRows:
    """Rows of a weight, its gradient and its moments, and their location in the full tensor."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    location: ShardLocation


class BF16StateAdamW(torch.optim.Optimizer):
    """AdamW with moments in bfloat16, which halves the optimizer state.

    The update is torch's fused AdamW in the weights' precision. New moments are rounded stochastically: with
    round-to-nearest, an update below half a bfloat16 ulp of the running mean would always be lost. Rounding depends on
    hashes of step, parameter name and element only, so it is the same for any sharding. In a step skipped by
    `found_inf` only the step count changes, because bfloat16 values round to themselves. A GPU runs one Triton kernel
    for each weight.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "step": 0})
        self._locations: dict[Tensor, ShardLocation] = {}
        self._step_supports_amp_scaling = True

    def set_shard_locations(self, locations: Mapping[Tensor, ShardLocation]) -> None:
        """Set the weights' locations in the full tensors. Weights without one count as full tensors without a name."""
        self._locations = dict(locations)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            if update := _choose_kernel(group["params"]):
                for rows in self._iter_shard_rows(group["params"], max_elements=sys.maxsize):
                    self._run_kernel(update, rows, group)
                continue
            chunk: list[ShardRows] = []
            for rows in self._iter_shard_rows(group["params"], CHUNK_ELEMENTS):
                if chunk and sum(r.weight.numel() for r in chunk) + rows.weight.numel() > CHUNK_ELEMENTS:
                    self._update(chunk, group)
                    chunk = []
                chunk.append(rows)
            if chunk:
                self._update(chunk, group)

    def _iter_shard_rows(self, weights: list[Tensor], max_elements: int) -> Iterator[ShardRows]:
        for weight in weights:
            if weight.grad is None or not weight.numel():
                continue
            state = self.state[weight]
            if not state:
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(weight, dtype=torch.bfloat16)
            shape = tuple(weight.shape)
            shard = self._locations.get(weight, ShardLocation("", shape, (0,) * len(shape)))
            tensors = weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]
            if weight.numel() <= max_elements:  # also a scalar, which has no rows
                yield ShardRows(*tensors, shard)
                continue
            n_rows = max(1, max_elements * shape[0] // weight.numel())
            for first in range(0, shape[0], n_rows):
                w, g, mean, square = (tensor[first : first + n_rows] for tensor in tensors)
                offsets = (shard.offsets[0] + first, *shard.offsets[1:])
                yield ShardRows(w, g, mean, square, ShardLocation(shard.name, shard.shape, offsets))

    def _update(self, chunk: list[ShardRows], group: dict[str, Any]) -> None:
        weights = [rows.weight for rows in chunk]
        means = [rows.mean.to(rows.weight.dtype) for rows in chunk]
        squares = [rows.square.to(rows.weight.dtype) for rows in chunk]
        steps_before = torch.full((), group["step"] - 1, dtype=torch.float32, device=weights[0].device)
        torch_adamw(
            weights, [rows.gradient for rows in chunk], means, squares, [], [steps_before.clone() for _ in chunk],
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip
        for rows, mean, square in zip(chunk, means, squares, strict=True):
            location, key = rows.location, _make_rounding_key(rows.location, group["step"])
            random = hash_elements(key, location.shape, location.offsets, tuple(mean.shape), mean.device)
            rows.mean.copy_(stochastic_round(mean.float(), random))
            rows.square.copy_(stochastic_round(square.float(), random >> 16))

    def _run_kernel(self, update: Callable[..., None], rows: ShardRows, group: dict[str, Any]) -> None:
        update(
            rows.weight, rows.gradient, rows.mean, rows.square, rows.location,
            key=_make_rounding_key(rows.location, group["step"]), step=group["step"], lr=group["lr"],
            betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip


def _make_rounding_key(location: ShardLocation, step: int) -> int:
    return int(rng.random_uint64(1, "moments", location.name, step)[0] >> 1)


def _choose_kernel(weights: Sequence[Tensor]) -> Callable[..., None] | None:
    """Return the Triton kernel's launcher, if the weights are on a GPU, in float32, and Triton is installed."""
    if not weights or weights[0].device.type != "cuda" or weights[0].dtype != torch.float32 or is_fake(weights[0]):
        return None
    if not has_triton():
        return None
    from megatfm.optim import adamw_triton

    return adamw_triton.update


@OPTIMIZERS.register("schedule_free_adamw")
def schedule_free(config: ScheduleFreeConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Schedule-free AdamW (Defazio et al. 2024), from the authors' package.

    The model's parameters are y, the point at which gradients are computed; the average x is evaluated and saved. The
    learning rate schedule provides the warm-up, as for all optimizers.
    """

    def build(groups: list[dict[str, Any]]) -> AdamWScheduleFree:
        optimizer = AdamWScheduleFree(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        optimizer.train()  # always: its eval() changes weights in place, and back with rounding errors
        return optimizer

    return [
        OptimizerGroup(
            list(parameters),
            "elementwise",
            build,
            make_weight_decay_options(parameters, config.weight_decay),
            compute_lr_scales(parameters),
            counters=("k", "weight_sum", "lr_max"),
            averaged=compute_evaluation_weights,
        )
    ]


def compute_evaluation_weights(block: Tensor, state: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """Return x, from y = (1 − β₁)z + β₁x."""
    return block.lerp(state["z"], 1 - 1 / options["betas"][0])


@OPTIMIZERS.register("adafactor")
def adafactor(config: AdafactorConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Adafactor (Shazeer & Stern 2018): no momentum, factored second moments of matrices.

    Updates need full tensors: they depend on means over rows, columns and all elements.
    """
    build = partial(
        Adafactor,
        lr=config.lr,
        beta2_decay=-config.beta2_decay,
        eps=(ADAFACTOR_EPS1_ROOT, config.eps2),
        d=config.clip_threshold,
    )
    options = make_weight_decay_options(parameters, config.weight_decay)
    names, rates, stacked = list(parameters), compute_lr_scales(parameters), list_stacked_names(parameters)
    return [OptimizerGroup(names, "whole_tensor", build, options, rates, stacked_names=stacked)]


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, with norms kept on the device: torch's makes the host wait for two of each tensor.

    w ← w − α·u/max(1, rms(u)/d), with u = g/√v̂ and α = min(lr, s^-½)·max(ε₂, rms(w)) in step s.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step without a wait of the host."""
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        gradient, (eps1_root, eps2) = weight.grad, group["eps"]
        assert gradient is not None
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if weight.dim() > 1:
                state["row_var"] = weight.new_zeros(*weight.shape[:-1], 1)
                state["col_var"] = weight.new_zeros(*weight.shape[:-2], 1, weight.shape[-1])
            else:
                state["variance"] = torch.zeros_like(weight)
        state["step"] += 1
        step = float(state["step"])
        scale = _root_mean_square(weight).clamp_(min=eps2) * min(group["lr"], step**-0.5)
        if group["weight_decay"]:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        if weight.dim() > 1:
            row, column = state["row_var"], state["col_var"]
            for moment, dim in ((row, -1), (column, -2)):
                mean_square = gradient.norm(dim=dim, keepdim=True).square_().div_(gradient.shape[dim])
                moment.lerp_(mean_square, step ** group["beta2_decay"])
            variance = (row @ column).div_(row.mean(-2, keepdim=True).clamp_(min=eps1_root))
        else:
            state["variance"].lerp_(gradient.square(), step ** group["beta2_decay"])
            variance = state["variance"].clone()
        update = variance.clamp_(min=eps1_root**2).rsqrt_().mul_(gradient)
        clipping = (_root_mean_square(update) / group["d"]).clamp_(min=1)
        weight.sub_(update.mul_(scale / clipping))


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.norm() / tensor.numel() ** 0.5


@OPTIMIZERS.register("lamb")
def lamb(config: LambConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """LAMB (You et al. 2020, algorithm 2). Weights without decay have no trust ratio either, as in the paper's BERT.

    Updates need full tensors, for their norms.
    """
    build = partial(Lamb, lr=config.lr, betas=config.betas, eps=config.eps)
    decays = make_weight_decay_options(parameters, config.weight_decay)
    options = {name: {**decays[name], "scaled": p.decays} for name, p in parameters.items()}
    names, rates, stacked = list(parameters), compute_lr_scales(parameters), list_stacked_names(parameters)
    return [OptimizerGroup(names, "whole_tensor", build, options, rates, counters=("step",), stacked_names=stacked)]


class Lamb(torch.optim.Optimizer):
    """w ← w − lr·‖w‖/‖u‖·u with u = m̂/(√v̂ + ε) + λw of Adam's m̂ and v̂; the ratio is 1 where a norm is 0."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "scaled": True, "step": 0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for weight in group["params"]:
                update = self._update(weight, group)
                if group["scaled"]:
                    norms = weight.norm(), update.norm()
                    ratio = norms[0] / norms[1]
                    # Keep the ratio on the device: reading it would make the host wait for each weight.
                    update.mul_(torch.where((norms[0] > 0) & (norms[1] > 0), ratio, torch.ones_like(ratio)))
                weight.add_(update, alpha=-group["lr"])

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        state = self.state[weight]
        if not state:
            state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        assert weight.grad is not None
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_()
        return mean.div_(root.add_(group["eps"])).add_(weight, alpha=group["weight_decay"])


@OPTIMIZERS.register("lion")
def lion(config: LionConfig, parameters: Parameters) -> list[OptimizerGroup]:
    """Lion (Chen et al. 2023); weight decay depends on the parameter's role."""
    build = partial(Lion, lr=config.lr, betas=config.betas)
    options = make_weight_decay_options(parameters, config.weight_decay)
    return [OptimizerGroup(list(parameters), "elementwise", build, options, compute_lr_scales(parameters))]


class Lion(torch.optim.Optimizer):
    """w ← w − lr·(sign(β₁m + (1−β₁)g) + λw), then m ← β₂m + (1−β₂)g."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            momenta = [self.state[weight]["exp_avg"] for weight in weights]
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
