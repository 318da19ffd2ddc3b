"""State besides gradients: what a checkpoint holds, parameters that pipeline ranks share, and state of modules."""

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
from megatfm.engines.interface import LossScale, StateDict, Stateful
from megatfm.engines.optimizers import State, WholeTensorOptimizer
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, PIPELINE, Mesh, sort_axes
from megatfm.parallel.pipeline_stages import Pipeline


class StatefulOptimizer(Protocol):
    """State of an optimizer, for checkpoints and evaluation."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Blocks that the optimizer moves, by name."""

    def refresh(self) -> None:
        """The weights were set from outside: look again, where there are copies of them."""

    def averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and save, of the blocks for which these are not the trained ones."""

    def state(self) -> State:
        """Name → key → tensor; not copies, and empty before the first step."""

    def load(self, state: State) -> None:
        """Take over what `state` gave."""


class TrainState:
    """The blocks that this rank's optimizers move (weights: name → block), and what they remember of them."""

    def __init__(
        self,
        weights: Mapping[str, ShardedTensor],
        optimizers: Sequence[StatefulOptimizer],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.weights, self.optimizers, self._loss_scale = weights, optimizers, loss_scale

    def state_dict(self) -> StateDict:
        """Weights as model.NAME, those to evaluate where these are others; optimizer state as optimizer.NAME.KEY; the
        loss scale as engine.KEY."""
        averaged = self._averaged()
        state: StateDict = {
            f"model.{name}": self._like(name, averaged.get(name, box.tensor))
            for name, box in self.weights.items()
        }
        for optimizer in self.optimizers:
            for name, values in optimizer.state().items():
                for key, value in values.items():
                    state[f"optimizer.{name}.{key}"] = self._stored(optimizer, name, value)
        return {**state, **(self._loss_scale.state() if self._loss_scale else {})}

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Return empty tensors for the contents of a checkpoint (name → dtype, global shape): weights in place, fresh
        optimizer state."""
        state: StateDict = {f"model.{name}": box for name, box in self.weights.items()}
        keys: dict[str, list[str]] = defaultdict(list)
        for full_name in stored:
            keys[full_name.rpartition(".")[0]].append(full_name)
        for optimizer in self.optimizers:
            for name, block in optimizer.tensors().items():
                for full_name in keys[f"optimizer.{name}"]:
                    dtype, shape = stored[full_name]
                    # On the device scalars too: a fused optimizer's step count lies beside the weights.
                    sizes = shape if isinstance(optimizer, WholeTensorOptimizer) else block.shape
                    value = torch.zeros(sizes if shape else (), dtype=dtype, device=block.device)
                    state[full_name] = self._stored(optimizer, name, value)
        scale = self._loss_scale.state() if self._loss_scale else {}
        return state | {name: value for name, value in scale.items() if name in stored}

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over optimizer state and loss scale from what `empty_state_dict` made and a checkpoint filled."""
        if self._loss_scale:
            self._loss_scale.load(state)
        for optimizer in self.optimizers:
            values: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.tensors()}
            for full_name, value in state.items():
                kind, _, path = full_name.partition(".")
                name, _, key = path.rpartition(".")
                if kind == "optimizer" and name in values:
                    values[name][key] = value.tensor if isinstance(value, ShardedTensor) else value
            optimizer.load(values)

    def refresh(self) -> None:
        """The weights were set from outside: optimizers that have copies of them look again."""
        for optimizer in self.optimizers:
            optimizer.refresh()

    @contextmanager
    def averaged_weights(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Have the weights to evaluate in place for a while. The trained ones come back from a copy, so to the last
        bit. on_change: called whenever the weights were."""
        averaged = self._averaged()
        trained = {name: self.weights[name].tensor.clone() for name in averaged}
        self._set(averaged, on_change)
        try:
            yield
        finally:
            self._set(trained, on_change)

    def _averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and save that are not the ones that are trained."""
        return {name: value for optimizer in self.optimizers for name, value in optimizer.averaged().items()}

    def _set(self, values: Mapping[str, Tensor], changed: Callable[[], None]) -> None:
        for name, value in values.items():
            self.weights[name].tensor.copy_(value)
        if values:
            changed()

    def _like(self, name: str, block: Tensor) -> ShardedTensor:
        """A block shaped like the one of the weight `name`."""
        return self.weights[name].with_tensor(block)

    def _stored(self, optimizer: StatefulOptimizer, name: str, value: Tensor) -> ShardedTensor | Tensor:
        if value.dim() == 0 or isinstance(optimizer, WholeTensorOptimizer):
            return value
        return self._like(name, value)


class TiedParameters:
    """Parameters that several pipeline ranks hold, because stages of theirs use them: tied tables, shared layers,
    biases.

    Each holder has the gradient of its own stages; the sum over them is that of the parameter. All of them update
    alike. Counts of modules that several ranks hold are added up in the same way. Without a pipeline it does nothing.
    """

    def __init__(self, pipeline: Pipeline | None, mesh: Mesh) -> None:
        self._rank, self._holders = mesh.rank(PIPELINE), pipeline.parameter_ranks if pipeline else {}
        self._modules = pipeline.module_ranks if pipeline else {}
        self._names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, holders in sorted(self._holders.items()):
            if len(holders) > 1 and pipeline and name not in pipeline.frozen:
                self._names[holders].append(name)
        shared = {holders for holders in (*self._names, *self._modules.values()) if len(holders) > 1}
        groups = {holders: _group(holders, mesh) for holders in sorted(shared)}
        self._groups = {holders: group for holders, group in groups.items() if self._rank in holders}

    def all_reduce_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of all holders up, in place."""
        for holders in self._groups:
            shares = [gradients[name] for name in self._names[holders] if name in gradients]
            all_reduce_flat(shares, partial(self.all_reduce, holders))

    def all_reduce(self, holders: tuple[int, ...], tensor: Tensor) -> None:
        """Sum a tensor in place over pipeline ranks, of which this is one."""
        if len(holders) > 1:
            dist.all_reduce(tensor, group=self._groups[holders])

    @property
    def groups(self) -> Iterable[ProcessGroup]:
        """Process groups that this rank sums in."""
        return self._groups.values()

    def is_owner(self, name: str) -> bool:
        """Whether this is the one rank of a pipeline on which a parameter is counted."""
        return not self._holders or self._holders[name][0] == self._rank

    def holders_of_module(self, path: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a module with buffers."""
        return self._modules.get(path, (self._rank,))


def _group(holders: tuple[int, ...], mesh: Mesh) -> ProcessGroup:
    """These ranks of this rank's pipeline; called by all ranks, which make the groups of all pipelines together."""
    ranks = mesh.device_mesh.mesh.flatten(1)
    if len(holders) == len(ranks):
        return mesh.group(PIPELINE)
    group, _ = dist.new_subgroups_by_enumeration(ranks[list(holders)].T.tolist())
    return group


class ModuleState:
    """Stateful modules of this rank's stages (see `interface.Stateful`), and all buffers that are stored.

    What a module observed is summed over the data axes, over those where its buffers' plan row says that ranks have a
    share each, and over the pipeline ranks that hold it.
    """

    def __init__(
        self, model: nn.Module, layout: ModelLayout, mesh: Mesh, ties: TiedParameters | None = None
    ) -> None:
        self._mesh, self._ties = mesh, ties or TiedParameters(None, mesh)
        self._modules: dict[str, tuple[Stateful, tuple[str, ...]]] = {}
        for path, module in model.named_modules():
            axes = _axes(path, module, layout)
            if isinstance(module, Stateful):
                self._modules[path] = module, axes
        buffers = dict(model.named_buffers())
        self.boxes = {
            name: ShardedTensor(buffers[name], placement.shape, placement.region[0])
            for name, placement in layout.state.items()
            if name in buffers
        }

    def forget(self) -> None:
        """Drop the observations since the last step."""
        for module, _ in self._modules.values():
            module.reset_counts()

    @torch.no_grad()
    def update(self) -> None:
        """Let each module take what all ranks observed into its state. A collective, where there is such a module."""
        for _, module, total in self._totals():
            module.update(total)

    @torch.no_grad()
    def statistics(self) -> dict[str, dict[str, Any]]:
        """By path, what modules that have a method `statistics` tell of what all ranks observed. A collective."""
        statistics: dict[str, dict[str, Any]] = {}
        for path, module, total in self._totals():
            if moe_options := getattr(module, "statistics", None):
                statistics[path] = moe_options(total)
        if self._mesh.size(PIPELINE) == 1:
            return statistics
        return {
            path: options
            for stage_statistics in self._mesh.gather_objects(statistics, (PIPELINE,))
            for path, options in stage_statistics.items()
        }

    def _totals(self) -> Iterator[tuple[str, Stateful, dict[str, Tensor]]]:
        """Yield each module with the sums of its observations. A collective."""
        for (axes, holders), paths in self._modules_by_ranks():
            observed = {path: dict(sorted(self._modules[path][0].observed.items())) for path in paths}
            # In float64 whole numbers add up to the same in any order.
            totals = {
                path: {name: value.to(torch.float64, copy=True) for name, value in values.items()}
                for path, values in observed.items()
                if values  # no pass reached the others, on any rank
            }

            def all_reduce(
                flat: Tensor, axes: tuple[str, ...] = axes, holders: tuple[int, ...] = holders
            ) -> None:
                self._mesh.all_reduce_(flat, axes)
                self._ties.all_reduce(holders, flat)

            all_reduce_flat([total for values in totals.values() for total in values.values()], all_reduce)
            for path, values in totals.items():
                in_dtype = {name: total.to(observed[path][name].dtype) for name, total in values.items()}
                yield path, self._modules[path][0], in_dtype

    def _modules_by_ranks(self) -> Iterator[tuple[tuple[tuple[str, ...], tuple[int, ...]], list[str]]]:
        """(axes, pipeline ranks) → the modules that are summed over these, in the same order on all ranks."""
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
        for path, (_, axes) in self._modules.items():
            groups.setdefault((axes, self._ties.holders_of_module(path)), []).append(path)
        yield from sorted(groups.items(), key=lambda item: item[0])


def _axes(path: str, module: nn.Module, layout: ModelLayout) -> tuple[str, ...]:
    placements = [layout.buffers[f"{path}.{key}"] for key, _ in module.named_buffers(recurse=False)]
    data = {axis for placement in placements for axis in placement.data_axes.all} or set(DENSE_DATA_AXES.all)
    return sort_axes({*data, *(axis for placement in placements for axis in placement.partial_axes)})
