"""Interface of engines: the calls of the training loop and `verify`, and the values that are exchanged."""

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
    """Dtypes of a run.

    param_dtype: of weights, optimizer state, and accumulated and reduced gradients. compute_dtype: of the model. fp8:
    how 8-bit matmuls of blocks are scaled (see `megatfm/ops/fp8.py`); None: no 8-bit matmuls.
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    fp8: Literal["rowwise", "tensorwise"] | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes in a dtype other than that of the stored weights."""
        return self.param_dtype != self.compute_dtype


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "fp8": Precision(torch.float32, torch.bfloat16, "rowwise"),
    "fp8-tensorwise": Precision(torch.float32, torch.bfloat16, "tensorwise"),
}

StateDict = dict[str, ShardedTensor | Tensor]
"""Blocks of global tensors, and whole tensors, by their names in a checkpoint."""

MOMENTS = 2
"""Optimizer state per weight, as Adam keeps it: an estimate that shows whether a step fits in memory."""

Batch = Mapping[str, Tensor]
Features = dict[str, Tensor]
Arrays = Mapping[str, Tensor | NDArray[Any]]
"""A batch as the loader returns it."""


class LossFunction(Protocol):
    """The part of an objective that an engine needs (see `megatfm.objectives.Objective`)."""

    @property
    def loss_weights(self) -> Mapping[str, float]: ...

    def target_counts(self, batch: Batch) -> dict[str, Tensor]: ...

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]: ...


class ComparingLoss(LossFunction, Protocol):
    """An objective that compares all samples of a global batch, from features computed one micro-batch at a time."""

    def features(self, model: nn.Module, batch: Batch) -> Features:
        """Return the inputs of the terms: tensors [samples, …], and scalars of the model [1]."""

    def compute_terms(self, model: nn.Module, features: Features) -> dict[str, Tensor]:
        """Return the terms from the features of all micro-batches of this rank. A collective of the data ranks."""


def compares_samples(objective: LossFunction) -> TypeGuard[ComparingLoss]:
    """Return whether an objective compares all samples of a global batch."""
    return bool(getattr(objective, "compares_samples", False))


@dataclass(frozen=True)
class RowSources:
    """Sources of the rows of a step, such as the corpora of a mixture.

    by_microbatch: for each micro-batch, the index in `names` of each row's source, int64 [rows].
    """

    names: Sequence[str]
    by_microbatch: Sequence[NDArray[np.int64]]


class LossTotals:
    """Sum and count of each loss term over a global batch, the same on every rank.

    weights: term → its factor in the loss. values: returns the sums and then the counts, in the order of the weights,
    each followed by those of the rows' sources. It is called when a property is first read; until then the device may
    still compute them.
    """

    def __init__(
        self, weights: Mapping[str, float], values: Callable[[], Sequence[float]], sources: Sequence[str] = ()
    ) -> None:
        self.loss_weights, self._values, self._sources = weights, values, sources

    @cached_property
    def sums(self) -> dict[str, float]:
        """Term → its unweighted sum over the global batch; the first read waits for the device."""
        return dict(zip(self.loss_weights, self._values(), strict=False))

    @cached_property
    def target_counts(self) -> dict[str, int]:
        """Term → number of items in its sum, such as tokens; the first read waits for the device."""
        values = self._values()
        return dict(zip(self.loss_weights, map(int, values[len(values) // 2 :]), strict=False))

    @property
    def loss_by_source(self) -> dict[str, float]:
        """Source → mean loss of its targets, for sources with targets in this batch; empty without rows' sources."""
        if not self._sources:
            return {}
        values, n_terms = self._values(), len(self.loss_weights)
        counts = values[len(values) // 2 + n_terms :]
        sums_and_counts = zip(self._sources, values[n_terms:], counts, strict=False)
        return {name: total / count for name, total, count in sums_and_counts if count}

    @property
    def loss(self) -> float:
        """Σ weight · sum / count over the terms."""
        return sum(self.loss_weights[term] * self.sums[term] / max(self.target_counts[term], 1) for term in self.sums)

    @property
    def terms(self) -> dict[str, float]:
        """Term → its mean; empty for a single term, which `loss` already reports."""
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
    """An optimizer that needs the location of its blocks, such as one that draws a random number for each element."""

    def set_shard_locations(self, locations: Mapping[Tensor, ShardLocation]) -> None:
        """Called once, before the first step, with the location of every parameter's block."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that one optimizer updates, and the granularity at which it needs them.

    granularity: "elementwise": any block of a tensor suffices (AdamW). "whole_tensor": the update of an element depends
    on others (Muon), so each tensor is gathered to one rank, which keeps its state.
    build: torch's parameter groups → the optimizer.
    options: name → its options, such as weight_decay.
    lr_ratios: name → its learning rate as a multiple of the run's; 1 if absent.
    counters: options that the optimizer changes from step to step, saved with the state.
    stacked_names: tensors that stack several along the first dim, each updated by itself; whole_tensor only.
    averaged: (block or whole tensor, state, options) → averaged weights to evaluate and save, as a new tensor.
    state_dtype: dtype of the state; None: that of the weights.
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

    def make_param_groups(self, tensors: Mapping[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
        """Return torch's parameter groups: names that share options and rate, and the group of their tensors."""
        groups: list[tuple[list[str], dict[str, Any]]] = []
        for name, tensor in tensors.items():
            options = {**self.options.get(name, {}), "lr_ratio": self.lr_ratios.get(name, 1.0)}
            for names, group in groups:
                if options == {key: value for key, value in group.items() if key != "params"}:
                    names.append(name)
                    group["params"].append(tensor)
                    break
            else:
                groups.append(([name], {"params": [tensor], **options}))
        return groups


@runtime_checkable
class CountingModule(Protocol):
    """A module with state that is updated without gradients, such as a router's bias that balances its experts' load.

    In training, `accumulate_counts` adds the counts of each micro-batch. Once a step, after the optimizer, the engine
    sums `observed` over all ranks, calls `update` with the sums on each, and then `reset_counts`; a skipped step only
    resets. The state lives in buffers with `persistent=True`, which checkpoints hold as model.NAME.
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
    """Lower bound of the bytes that a step needs on this rank, besides the weights that it holds already.

    gathered: weights gathered for the passes.
    """

    gradients: int
    optimizer_state: int
    gathered: int
    block_inputs: int
    """Inputs of blocks: the activations that every recompute mode keeps."""

    @property
    def total(self) -> int:
        """Sum in bytes."""
        return self.gradients + self.optimizer_state + self.gathered + self.block_inputs


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """A model as one rank runs it, before its weights exist.

    model: on the meta device; in a pipeline, this rank's stages only. layout: the result of `parallelize`. pipeline:
    stages of the full model; None without pipeline parallelism.
    """

    model: nn.Module
    layout: ModelLayout
    mesh: Mesh
    device: torch.device
    pipeline: Pipeline | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSetup(ParallelizedModel):
    """Everything that an engine is built from. precision: a key of `PRECISIONS`."""

    config: Config
    precision: str
    optimizers: Sequence[OptimizerGroup]


class DynamicScale(Protocol):
    """A factor of the loss in float16. can_fall: whether an overflow halves it, instead of ending the run."""

    value: float

    @property
    def can_fall(self) -> bool: ...


@runtime_checkable
class ScalesLoss(Protocol):
    """An engine that may scale losses; None: it doesn't, in this precision."""

    @property
    def loss_scale(self) -> DynamicScale | None: ...


@runtime_checkable
class RunsModel(Protocol):
    """An engine with the feature "samples"."""

    def run_model(self, function: Callable[[nn.Module], T]) -> T:
        """Call a function of the model in evaluation mode, with averaged weights if there are. A collective."""


class Engine(Protocol):
    """Runs training steps of one model over the ranks of a mesh.

    Methods are collectives: all ranks call them together, in the same order. Local to a rank are only the properties,
    `gradients`, `zero_grad`, `weights`, `state_dict` and `estimate_memory`.
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
        """Axes over which ranks hold copies of the same blocks of weights or of modules' state, which can be
        compared."""

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """Accumulate the gradient of the global batch's loss, once before a step.

        microbatches: all those of this data rank in the step. record_activations: measure activations for
        `layer_statistics`. sources: those of the rows, for losses by source; only passed to engines with the feature
        "loss_by_source". Raises MegatfmError if gradients of another call wait for `step` or `zero_grad`, and if a
        trained weight got none.
        """

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """Clip gradients to the global norm `clip` (0: no clipping) and update the weights.

        Returns the norm before clipping. If the loss or the norm is not finite, weights and state stay unchanged and
        the returned norm is not finite; the caller decides what follows. skip: treat the norm as not finite; the same
        on all ranks.
        """

    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """Return the loss over batches; every data rank must bring equally many, at least one."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's blocks of all gradients, complete over every axis after `forward_backward`."""

    def zero_grad(self) -> None:
        """Drop the gradients of `forward_backward`, and the counts of counting modules."""

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """Return layer → "weight", "gradient" or "activation" → √mean x², after `forward_backward`.

        Counting modules with a method `statistics(observed)` add further entries to their layer: numbers or lists.
        """

    def weights(self) -> Mapping[str, ShardedTensor]:
        """Return this rank's blocks of the weights, as the optimizer updates them, and of the state of modules; they
        may be filled in place."""

    def sync_weights(self) -> None:
        """Update all copies of the weights, after `weights` were set from outside."""

    def state_dict(self) -> StateDict:
        """Return the contents of a checkpoint, not copied: weights as model.NAME, optimizer state as
        optimizer.NAME.KEY, and other state as engine.KEY."""

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Return empty tensors for the contents of a checkpoint (name → dtype, global shape): weights in place, fresh
        optimizer state."""

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Load the result of `empty_state_dict`, filled by a checkpoint (the weights already are in place)."""

    def estimate_memory(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """Return the memory that one step needs. block_input: bytes of a micro-batch between two blocks."""

    def process_groups(self) -> Mapping[str, str]:
        """Return the name of each process group that the engine communicates over → the axis or axes of its ranks."""
