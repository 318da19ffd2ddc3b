"""State besides gradients: checkpoint contents, parameters that pipeline ranks share, and the state of modules."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.gradients import all_reduce_flat
from megatfm.engines.interface import CountingModule, StateDict
from megatfm.engines.losses import LossScale
from megatfm.engines.optimizers import State, WholeTensorOptimizer
from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, PIPELINE, Mesh, create_group_of, sort_axes
from megatfm.parallel.pipeline_stages import Pipeline


class StatefulOptimizer(Protocol):
    """State of an optimizer, for checkpoints and evaluation."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the blocks that the optimizer updates, by name."""

    def refresh(self) -> None:
        """Update copies of the weights, after these were set from outside."""

    def averaged(self) -> dict[str, Tensor]:
        """Return averaged weights to evaluate and save, by name; none for blocks that have no others."""

    def state(self) -> State:
        """Return name → key → tensor, not copied; empty before the first step."""

    def load(self, state: State) -> None:
        """Load the result of `state`."""


class TrainState:
    """Weights and optimizer state of this rank, as checkpoints hold them.

    weights: name → block, buffers of modules included. optimizers: they update the trained ones.
    """

    def __init__(
        self,
        weights: Mapping[str, ShardedTensor],
        optimizers: Sequence[StatefulOptimizer],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.weights, self.optimizers, self._loss_scale = weights, optimizers, loss_scale

    def state_dict(self) -> StateDict:
        """Return weights as model.NAME (averaged ones if there are), optimizer state as optimizer.NAME.KEY, and the
        loss scale as engine.KEY. Not copied."""
        averaged = self._collect_averages()
        state: StateDict = {
            f"model.{name}": block.with_tensor(averaged.get(name, block.tensor)) for name, block in self.weights.items()
        }
        for optimizer in self.optimizers:
            for name, values in optimizer.state().items():
                for key, value in values.items():
                    state[f"optimizer.{name}.{key}"] = self._shard_state(optimizer, name, value)
        return {**state, **(self._loss_scale.state_dict() if self._loss_scale else {})}

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Return empty tensors for the contents of a checkpoint (name → dtype, global shape): weights in place, fresh
        optimizer state."""
        state: StateDict = {f"model.{name}": block for name, block in self.weights.items()}
        keys: dict[str, list[str]] = defaultdict(list)
        for full_name in stored:
            keys[full_name.rpartition(".")[0]].append(full_name)
        for optimizer in self.optimizers:
            for name, block in optimizer.tensors().items():
                for full_name in keys[f"optimizer.{name}"]:
                    dtype, shape = stored[full_name]
                    # Scalars too go to the device: fused optimizers keep their step count there.
                    sizes = shape if isinstance(optimizer, WholeTensorOptimizer) else block.shape
                    value = torch.zeros(sizes if shape else (), dtype=dtype, device=block.device)
                    state[full_name] = self._shard_state(optimizer, name, value)
        scale = self._loss_scale.state_dict() if self._loss_scale else {}
        return state | {name: value for name, value in scale.items() if name in stored}

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Load optimizer state and loss scale from the result of `empty_state_dict`, filled by a checkpoint."""
        if self._loss_scale:
            self._loss_scale.load_state_dict(state)
        for optimizer in self.optimizers:
            values: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.tensors()}
            for full_name, value in state.items():
                kind, _, path = full_name.partition(".")
                name, _, key = path.rpartition(".")
                if kind == "optimizer" and name in values:
                    values[name][key] = value.tensor if isinstance(value, ShardedTensor) else value
            optimizer.load(values)

    def refresh(self) -> None:
        """Update optimizers' copies of the weights, after these were set from outside."""
        for optimizer in self.optimizers:
            optimizer.refresh()

    @contextmanager
    def averaged_weights(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Evaluate with averaged weights within this context; the trained ones are restored from a copy, bit for bit.

        on_change: called after the weights were set, unless the optimizers have no averages.
        """
        averaged = self._collect_averages()
        trained = {name: self.weights[name].tensor.clone() for name in averaged}
        self._copy_weights(averaged, on_change)
        try:
            yield
        finally:
            self._copy_weights(trained, on_change)

    def _collect_averages(self) -> dict[str, Tensor]:
        """Return the averaged weights of all optimizers."""
        return {name: value for optimizer in self.optimizers for name, value in optimizer.averaged().items()}

    def _copy_weights(self, values: Mapping[str, Tensor], on_change: Callable[[], None]) -> None:
        for name, value in values.items():
            self.weights[name].tensor.copy_(value)
        if values:
            on_change()

    def _shard_state(self, optimizer: StatefulOptimizer, name: str, value: Tensor) -> ShardedTensor | Tensor:
        """Return optimizer state as a block like the weight's; scalars and state of whole tensors unchanged."""
        if value.dim() == 0 or isinstance(optimizer, WholeTensorOptimizer):
            return value
        return self.weights[name].with_tensor(value)


class TiedParameters:
    """Parameters that several pipeline ranks hold because stages on each use them: tied embeddings, shared layers,
    biases.

    Each holder computes the gradient of its stages; the parameter's gradient is their sum, and all holders update
    alike. Counts of modules that several ranks hold are summed likewise. Without a pipeline it does nothing.
    """

    def __init__(self, pipeline: Pipeline | None, mesh: Mesh) -> None:
        self._rank, self._holders = mesh.rank(PIPELINE), pipeline.parameter_ranks if pipeline else {}
        self._modules = pipeline.module_ranks if pipeline else {}
        self._names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, holders in sorted(self._holders.items()):
            if len(holders) > 1 and pipeline and name not in pipeline.frozen:
                self._names[holders].append(name)
        shared = {holders for holders in (*self._names, *self._modules.values()) if len(holders) > 1}
        groups = {holders: _make_group(holders, mesh) for holders in sorted(shared)}
        self._groups = {holders: group for holders, group in groups.items() if self._rank in holders}

    def all_reduce_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of tied parameters over their holders, in place. A collective."""
        for holders in self._groups:
            tied = [gradients[name] for name in self._names[holders] if name in gradients]
            all_reduce_flat(tied, partial(self.all_reduce, holders))

    def all_reduce(self, holders: tuple[int, ...], tensor: Tensor) -> None:
        """Sum a tensor in place over pipeline ranks that include this one."""
        if len(holders) > 1:
            dist.all_reduce(tensor, group=self._groups[holders])

    @property
    def groups(self) -> Iterable[ProcessGroup]:
        """Process groups over which this rank sums."""
        return self._groups.values()

    def is_owner(self, name: str) -> bool:
        """Return whether this rank counts a parameter: one holder in each pipeline does."""
        return not self._holders or self._holders[name][0] == self._rank

    def get_module_holders(self, path: str) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a module with buffers."""
        return self._modules.get(path, (self._rank,))


def _make_group(holders: tuple[int, ...], mesh: Mesh) -> ProcessGroup:
    """Return the process group of some ranks of this pipeline. A collective: all ranks create the groups of all
    pipelines."""
    ranks = mesh.device_mesh.mesh.flatten(1)
    if len(holders) == len(ranks):
        return mesh.group(PIPELINE)
    other_ranks = [rank for rank in range(len(ranks)) if rank not in holders]
    return create_group_of(ranks[list(holders)].T.tolist(), ranks[other_ranks].T.tolist())


class ModuleState:
    """Counting modules of this rank's stages (see `interface.CountingModule`), and all buffers that are saved.

    Observations of a module are summed over the data axes, the `partial_axes` of its buffers, and the pipeline ranks
    that hold it.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, mesh: Mesh, ties: TiedParameters | None = None) -> None:
        self._mesh, self._ties = mesh, ties or TiedParameters(None, mesh)
        self._modules: dict[str, tuple[CountingModule, tuple[str, ...]]] = {}
        for path, module in model.named_modules():
            if not (hasattr(module, "reset_counts") or hasattr(module, "accumulate_counts")):
                continue  # few have them, and the protocol's own check is slow
            axes = _find_reduced_axes(path, module, layout)
            if not isinstance(module, CountingModule):
                members = ("observed", "accumulate_counts", "update", "reset_counts")
                missing = ", ".join(name for name in members if not hasattr(module, name))
                raise UsageError(f"{path}: {type(module).__name__} keeps counts, but lacks {missing}")
            self._modules[path] = module, axes
        tensors = dict(model.named_buffers())
        self.buffers = {
            name: ShardedTensor(tensors[name], buffer.shape, buffer.region[0])
            for name, buffer in layout.state.items()
            if name in tensors
        }

    def reset(self) -> None:
        """Drop the observations since the last step."""
        for module, _ in self._modules.values():
            module.reset_counts()

    @torch.no_grad()
    def update(self) -> None:
        """Update each module's state from the observations of all ranks. A collective if there is such a module."""
        for _, module, total in self._sum_observations():
            module.update(total)

    @torch.no_grad()
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return path → statistics of all ranks' observations, by the modules' method `statistics`. A collective."""
        statistics: dict[str, dict[str, Any]] = {}
        for path, module, total in self._sum_observations():
            if compute := getattr(module, "statistics", None):
                statistics[path] = compute(total)
        if self._mesh.size(PIPELINE) == 1:
            return statistics
        return {
            path: values
            for stage_statistics in self._mesh.gather_objects(statistics, (PIPELINE,))
            for path, values in stage_statistics.items()
        }

    def _sum_observations(self) -> Iterator[tuple[str, CountingModule, dict[str, Tensor]]]:
        """Yield each module with the sums of its observations. A collective."""
        for (axes, holders), paths in self._iter_modules_by_ranks():
            observed = {path: dict(sorted(self._modules[path][0].observed.items())) for path in paths}
            # Float64 sums of integers are exact in any order.
            totals = {
                path: {name: value.to(torch.float64, copy=True) for name, value in values.items()}
                for path, values in observed.items()
                if values  # no pass reached the others, on any rank
            }

            def all_reduce(flat: Tensor, axes: tuple[str, ...] = axes, holders: tuple[int, ...] = holders) -> None:
                self._mesh.all_reduce_(flat, axes)
                self._ties.all_reduce(holders, flat)

            all_reduce_flat([total for values in totals.values() for total in values.values()], all_reduce)
            for path, values in totals.items():
                in_dtype = {name: total.to(observed[path][name].dtype) for name, total in values.items()}
                yield path, self._modules[path][0], in_dtype

    def _iter_modules_by_ranks(self) -> Iterator[tuple[tuple[tuple[str, ...], tuple[int, ...]], list[str]]]:
        """Yield (axes, pipeline ranks) and the modules that are summed over these, in the same order on all ranks."""
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
        for path, (_, axes) in self._modules.items():
            groups.setdefault((axes, self._ties.get_module_holders(path)), []).append(path)
        yield from sorted(groups.items(), key=lambda item: item[0])


def _find_reduced_axes(path: str, module: nn.Module, layout: ModelLayout) -> tuple[str, ...]:
    """Return the axes over which a module's observations are summed."""
    buffers = [layout.buffers[f"{path}.{key}"] for key, _ in module.named_buffers(recurse=False)]
    data_axes = {axis for buffer in buffers for axis in buffer.data_axes.all} or set(DENSE_DATA_AXES.all)
    return sort_axes({*data_axes, *(axis for buffer in buffers for axis in buffer.partial_axes)})
