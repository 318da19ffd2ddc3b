"""Single-device reference: the plain model with reference operators, torch's autograd and one optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.engines.interface import NeedsShardLocations, OptimizerGroup, ShardLocation
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.initialisation import Normal, draw, initialise, iter_inits
from megatfm.layers.output_head import CrossEntropy
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.two_towers import TERM, ContrastiveLoss
from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.attention.reference import attention_reference
from megatfm.ops.contrastive import contrastive_loss_reference
from megatfm.ops.cross_entropy import cross_entropy_reference
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.parallel.layout import replace_forward
from megatfm.train.build import build_model
from megatfm.verify.shrink import Arrays, objective_for


@dataclass(frozen=True)
class ReferenceStep:
    """Loss and gradients of a global batch."""

    loss: float
    gradients: Mapping[str, Tensor]

    @property
    def grad_norm(self) -> float:
        """L2 norm of all gradients together, before clipping."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def draw_perturbation(
    seed: int, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Draw the noise that both sides add to initial weights: norms that start at 1 would hide mistakes."""
    return draw(Normal(0.1), seed, f"verify {name}", shape, offsets, sizes)


def take_reference_step(config: Config, batch: Arrays) -> ReferenceStep:
    """Compute loss and gradients by plain autograd in float64, over the global batch at once."""
    model = build_model(config).double().train()
    initialise_perturbed(model, config.train.seed)
    for module in model.modules():
        # Subclasses build keys and values, and call it in the end.
        if isinstance(module, DotProductAttention):
            module.attend_head_shard = partial(_attend, module)  # type: ignore[method-assign]
        elif isinstance(module, CrossEntropy):
            replace_forward(module, partial(_compute_cross_entropy, module))
        elif isinstance(module, ContrastiveLoss):
            replace_forward(module, partial(_compute_contrastive_loss, module))
    objective = objective_for(config)
    tensors = {field: torch.from_numpy(values) for field, values in batch.items()}
    counts = objective.target_counts(tensors)
    terms = objective(model, tensors)
    loss = torch.stack([objective.loss_weights[term] * terms[term] / counts[term].clamp(min=1) for term in terms]).sum()
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return ReferenceStep(loss.item(), gradients)


def initialise_perturbed(model: nn.Module, seed: int) -> None:
    """Initialise a model with the perturbed weights that both sides compute with."""
    initialise(model, seed)
    for name, tensor, _ in iter_inits(model):
        if isinstance(tensor, nn.Parameter):
            shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
            tensor.data.add_(draw_perturbation(seed, name, shape, offsets, shape))


def _attend(
    core: DotProductAttention,
    head_shard: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: SequenceMetadata,
    bias: Tensor | None = None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Replace `DotProductAttention.attend_head_shard`, for all heads at once."""
    rng_keys = core.dropout.make_head_rng_keys(sequence, q.shape[1])
    sinks = None if core.sinks is None else core.sinks.weight
    mask = mask or PatternMask(core.pattern, sequence, 0, q.shape[1])
    return attention_reference(q, k, v, mask, bias, core.options, rng_keys, sinks)


def _compute_cross_entropy(
    module: CrossEntropy,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    losses: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    if losses is None and weights is None:
        return cross_entropy_reference(hidden, weight, targets, bias, module.options)
    token_losses = [
        cross_entropy_reference(hidden[i : i + 1], weight, targets[i : i + 1], bias, module.options)
        for i in range(len(targets))
    ]
    per_token = torch.stack(token_losses)
    if losses is not None:
        losses.copy_(per_token.detach())
    return per_token.sum() if weights is None else (per_token * weights).sum()


def _compute_contrastive_loss(
    module: ContrastiveLoss, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None, _: object
) -> dict[str, Tensor]:
    return {TERM: contrastive_loss_reference(images, texts, scale, bias, module.kind)}


CLIP_EPSILON = 1e-6
"""Added to the norm when gradients are clipped, as in `torch.nn.utils.clip_grad_norm_`."""


def compute_plain_weights(config: Config) -> dict[str, Tensor]:
    """Return name → full trained weight before the step, in float64."""
    model = build_model(config).double()
    initialise_perturbed(model, config.train.seed)
    return {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}


def take_plain_step(
    config: Config, model: nn.Module, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Take the first step of the config's optimizer; returns name → new weight.

    model: gives the optimizer groups. gradients: before clipping. Use the layout's own gradients: an update amplifies
    the rounding of gradients near zero, since Adam divides by their size.
    """
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
    max_norm = config.optimizer.max_grad_norm
    factor = max_norm / (float(norm) + CLIP_EPSILON) if max_norm and norm > max_norm else 1.0
    updated = {name: weight.clone() for name, weight in weights.items()}
    for group in build_optimizer_groups(config.optimizer, model):
        group_weights = {name: updated[name] for name in group.names if name in updated}
        group_gradients = {name: gradients[name].to(updated[name]) * factor for name in group_weights}
        _step_optimizer(group, group_weights, group_gradients, config.optimizer.lr)
    return updated


def _step_optimizer(
    group: OptimizerGroup, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> None:
    """Update weights in place."""
    if not weights:
        return

    def unstack(name: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor) if name in group.stacked_names else [tensor]

    matrices = {name: unstack(name, weight) for name, weight in weights.items()}
    param_groups: list[dict[str, Any]] = []
    for names, options in group.make_param_groups(weights):
        param_groups.append({**options, "params": [matrix for name in names for matrix in matrices[name]]})
    optimizer = group.build(param_groups)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group["lr_ratio"]
    for name, gradient in gradients.items():
        for matrix, matrix_gradient in zip(matrices[name], unstack(name, gradient), strict=True):
            matrix.grad = matrix_gradient.clone()
    if isinstance(optimizer, NeedsShardLocations):
        origin = (0,) * 8
        locations = {
            weight: ShardLocation(name, tuple(weight.shape), origin[: weight.dim()]) for name, weight in weights.items()
        }
        optimizer.set_shard_locations(locations)
    optimizer.step()
