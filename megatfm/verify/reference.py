"""The single-device side: the plain model, the slow operators, torch's own autograd; no engine, plan or mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.layers.attention import DotProductAttention
from megatfm.layers.attention.patterns import PatternMask
from megatfm.layers.head import CrossEntropy
from megatfm.layers.initialisation import initialise, iter_inits
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import AttentionMask, attention_reference
from megatfm.ops.cross_entropy import cross_entropy_reference
from megatfm.ops.initial import Normal, draw
from megatfm.parallel.forward import replace_forward
from megatfm.train.build import build_model
from megatfm.verify.batch import Arrays, objective_for


@dataclass(frozen=True)
class ReferenceStep:
    """Loss and gradients of one global batch."""

    loss: float
    gradients: Mapping[str, Tensor]

    @property
    def grad_norm(self) -> float:
        """L2 norm over all gradients together, before clipping."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def perturbation(
    seed: int, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """What is added to a block of the initial weights on both sides: norms that start at 1 would hide mistakes."""
    return draw(Normal(0.1), seed, f"verify {name}", shape, offsets, sizes)


def reference_step(config: Config, batch: Arrays) -> ReferenceStep:
    """Loss and gradients by plain autograd in float64, the whole global batch at once."""
    model = build_model(config).double().train()
    initialise_perturbed(model, config.train.seed)
    for module in model.modules():
        if isinstance(
            module, DotProductAttention
        ):  # each core of its own kind makes keys and values, and ends there
            module.of_heads = partial(_attention, module)  # type: ignore[method-assign]
        elif isinstance(module, CrossEntropy):
            replace_forward(module, partial(_cross_entropy, module))
    objective = objective_for(config)
    tensors = {field: torch.from_numpy(values) for field, values in batch.items()}
    counts = objective.target_counts(tensors)
    terms = objective(model, tensors)
    loss = torch.stack(
        [objective.loss_weights[term] * terms[term] / counts[term].clamp(min=1) for term in terms]
    ).sum()
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return ReferenceStep(loss.item(), gradients)


def initialise_perturbed(model: nn.Module, seed: int) -> None:
    """Set a model's weights to those that both sides compute with."""
    initialise(model, seed)
    for name, tensor, _ in iter_inits(model):
        if isinstance(tensor, nn.Parameter):
            shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
            tensor.data.add_(perturbation(seed, name, shape, offsets, shape))


def _attention(
    core: DotProductAttention,
    part: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceMetadata,
    bias: Tensor | None = None,
    seen: AttentionMask | None = None,
) -> Tensor:
    """As `Core.of_heads`, of all heads."""
    rng_keys = core.dropout.head_rng_keys(layout, q.shape[1])
    sinks = None if core.sinks is None else core.sinks.weight
    seen = seen or PatternMask(core.pattern, layout, 0, q.shape[1])
    return attention_reference(q, k, v, seen, bias, core.variant, rng_keys, sinks)


def _cross_entropy(
    seam: CrossEntropy, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> Tensor:
    return cross_entropy_reference(hidden, weight, targets, bias, seam.variant)
