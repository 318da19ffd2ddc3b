"""The interface of engines: the calls of the training loop and `verify`, and the values that are exchanged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.checkpoint import ShardedTensor
from megatfm.config import Config
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import Mesh
from megatfm.parallel.pipeline_stages import Pipeline

T = TypeVar("T")


@dataclass(frozen=True)
class Precision:
    """Arithmetic of a run. param_dtype: of weights, optimizer state, and gradients that are accumulated and reduced.
    compute_dtype: of the model. fp8: how the products of blocks are scaled, where they are made of 8-bit floats (see
    `megatfm/ops/fp8.py`)."""

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    fp8: Literal["rowwise", "tensorwise"] | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes in another dtype than that of the stored weights."""
        return self.param_dtype != self.compute_dtype


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "fp8": Precision(torch.float32, torch.bfloat16, "rowwise"),
    "fp8-tensorwise": Precision(torch.float32, torch.bfloat16, "tensorwise"),
}

FIRST, LARGEST, SMALLEST, PATIENCE = 2.0**16, 2.0**24, 1.0, 2000
"""Steps without an overflow after which the scale is doubled (that of torch.amp.GradScaler)."""
SCALE, STEPS = "engine.loss_scale", "engine.loss_scale_steps"


class LossScale:
    """Dynamic loss scale of float16 (Micikevicius et al. 2018, section 3.2): gradients too small for it are lifted into
    its range, and a step whose gradients leave the range at the other end is skipped.

    All ranks see the same norm of the gradients, so they hold the same scale.
    """

    def __init__(self, first: float = FIRST, patience: int = PATIENCE) -> None:
        self.value, self._patience, self._steps = first, patience, 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step, by whether its gradients were finite."""
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, SMALLEST)
        elif self._steps == self._patience:
            self.value, self._steps = min(self.value * 2, LARGEST), 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's fault: it isn't settled, or the gradients have grown."""
        return self.value > SMALLEST

    def state(self) -> dict[str, Tensor]:
        """The scale and the finite steps since it last changed, as scalars, so that a resume scales alike."""
        return {
            SCALE: torch.tensor(self.value, dtype=torch.float64),
            STEPS: torch.tensor(self._steps, dtype=torch.int64),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Take over a saved scale; a checkpoint of another precision has none."""
        value, steps = state.get(SCALE), state.get(STEPS)
        if isinstance(value, Tensor) and isinstance(steps, Tensor):
            self.value, self._steps = value.item(), int(steps)


StateDict = dict[str, ShardedTensor | Tensor]
"""Blocks of global tensors, and tensors that are whole, by their names in a checkpoint."""

MOMENTS = 2
"""Optimizer state per weight, as Adam has it: near enough to see that something will not fit."""

Batch = Mapping[str, Tensor]
Features = dict[str, Tensor]
Arrays = Mapping[str, Tensor | NDArray[Any]]
"""A batch as the loader gives it."""


class LossFunction(Protocol):
    """The part of an objective that an engine needs (see `megatfm.objectives.Objective`)."""

    @property
    def loss_weights(self) -> Mapping[str, float]: ...

    def target_counts(self, batch: Batch) -> dict[str, Tensor]: ...

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]: ...


class ComparingLoss(LossFunction, Protocol):
    """An objective whose terms are made of the features of all samples of a global batch, of which a model makes those
    of a micro-batch at a time."""

    def features(self, model: nn.Module, batch: Batch) -> Features:
        """Inputs of the terms: tensors [samples, …], and numbers of the model [1]."""

    def terms_of(self, model: nn.Module, features: Features) -> dict[str, Tensor]:
        """The terms of the features of all micro-batches here. A collective of the data ranks."""


def compares_samples(objective: LossFunction) -> TypeGuard[ComparingLoss]:
    """Return whether an objective's terms are made of all samples of a global batch at once."""
    return bool(getattr(objective, "compares_samples", False))


@dataclass(frozen=True)
class RowSources:
    """Sources of the rows of a step, such as the corpora of a mixture: their names, and for each micro-batch the number
    of the source of each row, int64 [rows]."""

    names: Sequence[str]
    by_microbatch: Sequence[NDArray[np.int64]]


class LossTotals:
    """Per loss term its sum and count over a whole global batch, the same on every rank.

    weights: term → its factor in the loss. values: returns the sums and then the counts, in the order of the weights,
    each followed by those of the sources of rows. It is called at the first look at one of them: until then they may be
    under way on the device.
    """

    def __init__(
        self, weights: Mapping[str, float], values: Callable[[], Sequence[float]], sources: Sequence[str] = ()
    ) -> None:
        self.loss_weights, self._values, self._sources = weights, values, sources

    @cached_property
    def sums(self) -> dict[str, float]:
        """Term → its sum over the global batch, not weighted; the first look waits for the device."""
        return dict(zip(self.loss_weights, self._values(), strict=False))

    @cached_property
    def target_counts(self) -> dict[str, int]:
        """Term → how many items its sum is over, such as tokens; the first look waits for the device."""
        values = self._values()
        return dict(zip(self.loss_weights, map(int, values[len(values) // 2 :]), strict=False))

    @property
    def loss_by_source(self) -> dict[str, float]:
        """Source → mean loss of its targets, where it has some in this batch; nothing unless rows' sources were
        given."""
        if not self._sources:
            return {}
        values, n_terms = self._values(), len(self.loss_weights)
        counts = values[len(values) // 2 + n_terms :]
        parts = zip(self._sources, values[n_terms:], counts, strict=False)
        return {name: total / count for name, total, count in parts if count}

    @property
    def loss(self) -> float:
        """Σ weight · sum / count."""
        return sum(
            self.loss_weights[term] * self.sums[term] / max(self.target_counts[term], 1) for term in self.sums
        )

    @property
    def terms(self) -> dict[str, float]:
        """The mean of each term where there are several; else nothing that `loss` would not say."""
        if len(self.sums) == 1:
            return {}
        return {term: total / max(self.target_counts[term], 1) for term, total in self.sums.items()}


@dataclass(frozen=True)
class ShardLocation:
    """Location of a rank's block: the parameter's name and global shape, and the block's offsets in it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@runtime_checkable
class NeedsShardLocations(Protocol):
    """An optimizer that has to know where the elements it moves are, such as one that draws a number for each."""

    def set_shard_locations(self, places: Mapping[Tensor, ShardLocation]) -> None:
        """Called once, before the first step, with the block of every parameter."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that one optimizer moves, and the granularity at which it needs them.

    elementwise: any block of a tensor will do (AdamW). whole_tensor: the update of an element depends on others
    (Muon), so each tensor is gathered to one rank, which keeps its state.
    build: from parameter groups as torch takes them, each with the options that its names share.
    options: name → its options, such as weight_decay. lr_ratios: name → its rate as a multiple of the run's, else 1.
    counters: options that the optimizer itself changes from step to step, and which are saved with the state.
    stacked_names: names of tensors that are several along the first dim, each moved by itself; whole_tensor only.
    averaged: (block, state, options) → the weights to evaluate and save, where these are not the ones that are
    trained; elementwise only.
    state_dtype: dtype of the state, where it is not that of the weights.
    """

    names: Sequence[str]
    granularity: Literal["elementwise", "whole_tensor"]
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lr_ratios: Mapping[str, float] = field(default_factory=dict)
    counters: Sequence[str] = ()
    stacked_names: frozenset[str] = frozenset()
    averaged: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Any]], Tensor] | None = None
    state_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.averaged and self.granularity != "elementwise":
            raise ValueError(
                "averaged weights are computed from local blocks: granularity must be 'elementwise'"
            )

    def parameter_groups(self, tensors: Mapping[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
        """Names with the same options and rate, and torch's parameter group of their tensors."""
        groups: list[tuple[list[str], dict[str, Any]]] = []
        for name, tensor in tensors.items():
            options = {**self.options.get(name, {}), "lr_ratio": self.lr_ratios.get(name, 1.0)}
            for names, known_names in groups:
                if options == {key: value for key, value in known_names.items() if key != "params"}:
                    names.append(name)
                    known_names["params"].append(tensor)
                    break
            else:
                groups.append(([name], {"params": [tensor], **options}))
        return groups


@runtime_checkable
class Stateful(Protocol):
    """A module with state that no gradient moves, such as a router's bias that evens out its experts' load.

    While micro-batches are trained on, `accumulate_counts` adds counts up. Once a step, after the optimizer, the
    engine sums `observed` over all ranks, gives it to `update` on each of them, and calls `reset_counts`; a step that
    is skipped only forgets. The state itself lies in buffers with `persistent=True`, which checkpoints hold as
    model.NAME.
    """

    @property
    def observed(self) -> Mapping[str, Tensor]:
        """Return the counts since the last step; the same names on all ranks."""

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Add the counts of a micro-batch."""

    def update(self, observed: Mapping[str, Tensor]) -> None:
        """Update the state from the observations of the global batch; the same on all ranks."""

    def reset_counts(self) -> None:
        """Set the counts to zero."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a step takes on this rank at least, besides the weights that it holds already."""

    gradients: int
    optimizer_state: int
    gathered: int
    block_inputs: int
    """Inputs of blocks: the activations that every recompute mode keeps."""

    @property
    def total(self) -> int:
        """Bytes of all of them at once."""
        return self.gradients + self.optimizer_state + self.gathered + self.block_inputs


@dataclass(frozen=True)
class EngineSetup:
    """Everything that an engine is built from.

    model: on the meta device, its plan laid; in a pipeline, this rank's stages only. layout: returned by `parallelize`.
    pipeline: how the whole model is cut into stages, if it is.
    """

    config: Config
    model: nn.Module
    layout: ModelLayout
    mesh: Mesh
    device: torch.device
    precision: str
    optimizers: Sequence[OptimizerGroup]
    pipeline: Pipeline | None = None


@runtime_checkable
class RunsModel(Protocol):
    """An engine with the feature "samples"."""

    def run_model(self, function: Callable[[nn.Module], T]) -> T:
        """Call a function of the model in evaluation mode, with the weights to evaluate. A collective."""


def loss_scale_of(engine: "Engine") -> LossScale | None:
    """The scale of an engine that scales losses (float16), plugins' too; None where it doesn't."""
    scale = getattr(engine, "loss_scale", None)
    return scale if isinstance(scale, LossScale) else None


class Engine(Protocol):
    """Carries out training steps of one model over the ranks of a mesh.

    Every method is a collective: all ranks call it together, in the same order, but for the properties, `gradients`,
    `zero_grad`, `weights`, `state_dict` and `memory_needed`, which look at this rank alone.
    """

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def replicated_axes(self) -> Sequence[str]:
        """Axes over which ranks hold copies of the same blocks, so that these can be compared."""

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """Accumulate the gradient of the global batch's loss, of which these are this data rank's micro-batches.

        All that a step takes come at once: raises MegatfmError where gradients of another call wait for `step` or
        `zero_grad`. record_activations: measure activations on the way, for `layer_statistics`. sources: of the rows,
        whose losses are then told apart; only an engine with the feature "loss_by_source" is given them.
        """

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """Clip by the global gradient norm (0: don't) and take an optimizer step. Returns the norm before clipping.

        A loss or norm that is not finite leaves weights and state unchanged, and the returned norm is not finite; it
        is for the caller to act on it. skip: do as if the norm were not; all ranks must ask alike.
        """

    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """The loss over batches, of which every data rank must bring equally many, and at least one."""

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's blocks of all gradients, complete over every axis after `forward_backward`."""

    def zero_grad(self) -> None:
        """Drop the gradients of `forward_backward`, and what stateful modules observed."""

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """After `forward_backward`: layer → "weight", "gradient" or "activation" → √mean x², and what else the layer's
        stateful modules tell, numbers or lists of them, if they have a method `statistics(observed)`."""

    def weights(self) -> Mapping[str, ShardedTensor]:
        """This rank's blocks of the weights, as the optimizer moves them, and of the state of modules: to be filled in
        place."""

    def weights_changed(self) -> None:
        """Update all copies of the weights, after `weights` were set from outside."""

    def state_dict(self) -> StateDict:
        """Everything that a checkpoint holds of the engine, not copied: weights as model.NAME, the state of optimizers
        as optimizer.NAME.KEY, and what else it keeps as engine.KEY."""

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Return empty tensors for the contents of a checkpoint (name → dtype, global shape): weights in place, fresh
        optimizer state."""

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over what `empty_state_dict` made and a checkpoint filled (the weights already are in place)."""

    def memory_needed(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """Memory that one step needs. block_input: bytes of a micro-batch between two blocks."""

    def process_groups(self) -> Mapping[str, str]:
        """Name of each process group that the engine sends over → the axis, or axes, that its ranks lie on."""
