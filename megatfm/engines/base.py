"""Base of the engines: what all of them share in a training step, and the preparation before the first one."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.gradients import GlobalNorm, LayerStatistics, all_reduce_partial_gradients
from megatfm.engines.interface import (
    Arrays,
    Batch,
    ComparingLoss,
    LossFunction,
    LossTotals,
    OptimizerGroup,
    Precision,
    RowSources,
    ShardLocation,
    StateDict,
    compares_samples,
)
from megatfm.engines.losses import (
    LossAccumulator,
    LossScale,
    check_no_pending_gradients,
    make_local_batch,
    record_row_losses,
)
from megatfm.engines.optimizers import ElementwiseOptimizer, WholeTensorOptimizer
from megatfm.engines.passes import ForwardBackward, GradientSync, LossScaler
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.engines.state import ModuleState, StatefulOptimizer, TiedParameters, TrainState
from megatfm.errors import MegatfmError
from megatfm.layers.initialisation import draw, iter_inits
from megatfm.layers.output_head import LMHead
from megatfm.ops.torch_private import is_fake
from megatfm.ops.transfer import DeferredReads
from megatfm.parallel.layout import ModelLayout, iter_blocks
from megatfm.parallel.mesh import PIPELINE, DataAxes, Mesh, sort_axes
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.parallel.process_environment import count_local_ranks


class BaseEngine:
    """Shared part of engines that hold blocks of weights: passes, sums over axes, checks and state (see `Engine`).

    A subclass defines how backward passes reduce gradients (`_prepare_passes`), where gradients are stored
    (`gradients`), how weights are updated (`step`), and how the model follows them (`_sync_all_weights`). It calls
    `_build_state` once its weights exist.
    """

    layout: ModelLayout
    mesh: Mesh
    device: torch.device
    precision: Precision
    pipeline: Pipeline | None
    loss_scale: LossScale | None
    state: TrainState
    local: dict[str, Tensor]
    """This rank's blocks of the weights, as the optimizer updates them."""
    passes: ForwardBackward

    def _build_state(
        self,
        model: nn.Module,
        weights: Mapping[str, ShardedTensor],
        optimizers: Sequence[StatefulOptimizer],
        ties: TiedParameters,
        *,
        sharded: bool,
        shards_replicas: bool = False,
        compiled: bool = False,
    ) -> None:
        """Set up the state that is summed or saved besides gradients. A collective. sharded, shards_replicas: see
        `GlobalNorm`."""
        self.ties = ties
        self.module_state = ModuleState(model, self.layout, self.mesh, ties)
        self.state = TrainState({**weights, **self.module_state.buffers}, optimizers, self.loss_scale)
        self.global_norm = GlobalNorm(
            self.layout,
            self.mesh,
            self.device,
            sharded=sharded,
            shards_replicas=shards_replicas,
            is_counted=ties.is_owner,
        )
        self.layer_stats = LayerStatistics(model, self.layout, self.mesh, self.global_norm, compiled=compiled)
        self.reads = DeferredReads()
        self.pending_losses: tuple[LossTotals, Tensor] | None = None
        """Losses whose gradients wait for a step: for the host, and their sums and counts on the device."""
        self.pipeline_groups: list[ProcessGroup] = []
        self._heads = [module for module in model.modules() if isinstance(module, LMHead)]

    def _build_pipeline(self, model: nn.Module, pipeline: Pipeline) -> ForwardBackward:
        """Build the passes of a pipeline, with a process group for each direction. A collective."""
        self.pipeline_groups = [self.mesh.group(PIPELINE), self.mesh.create_group_along(PIPELINE)]
        dtype = self.precision.compute_dtype
        return PipelineForwardBackward(model, pipeline, *self.pipeline_groups, dtype=dtype, device=self.device)

    def _set_training(self, training: bool) -> None:
        raise NotImplementedError

    def _prepare_passes(
        self, losses: LossAccumulator, record_activations: bool
    ) -> tuple[ForwardBackward, LossScaler, GradientSync]:
        """Return how a step's passes run, how their losses are scaled, and when their gradients are reduced."""
        raise NotImplementedError

    def _finish_passes(self) -> None:
        """Finish the sums of gradients over the data axes; they still carry the loss scale."""
        raise NotImplementedError

    def _evaluate_batch(self, batch: Batch, objective: LossFunction) -> Mapping[str, Tensor]:
        return self.passes.evaluate(batch, objective)

    def _compare_samples(self, batches: Iterable[Batch], objective: ComparingLoss) -> Mapping[str, Tensor]:
        """Return the terms of all samples of the micro-batches; for engines with the feature "compares_samples"."""
        raise NotImplementedError

    def _find_weights_without_gradient(self) -> Collection[str]:
        """Return the names of trained weights that no pass of the step has reached."""
        raise NotImplementedError

    def _drop_gradients(self) -> None:
        raise NotImplementedError

    def _sync_trained_weights(self) -> None:
        """Set the weights that the model computes with from `local`, except frozen ones."""
        raise NotImplementedError

    def _sync_all_weights(self) -> None:
        """Set the weights that the model computes with from `local`, frozen ones too."""
        raise NotImplementedError

    def _get_replicated_data_axes(self, data_axes: DataAxes) -> Sequence[str]:
        """Return the data axes over which ranks hold copies of a weight's block."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """See `Engine.gradients`."""
        raise NotImplementedError

    @property
    def replicated_axes(self) -> Sequence[str]:
        """See `Engine.replicated_axes`."""
        axes = {axis for layout in self.layout.values() for axis in self._get_replicated_data_axes(layout.data_axes)}
        axes |= {axis for layout in self.layout.state.values() for axis in layout.data_axes.all}
        return sort_axes(axes)

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """See `Engine.forward_backward`."""
        check_no_pending_gradients(self.pending_losses)
        self._set_training(True)
        self.layer_stats.watch(record_activations)
        batches = [make_local_batch(batch, self.device, self.layout) for batch in microbatches]
        losses = LossAccumulator(objective, self.mesh, self.device, self.reads, sources)
        losses.count(microbatches)
        passes, scale_loss, gradient_sync = self._prepare_passes(losses, record_activations)
        with record_row_losses(self._heads if sources else []) as recorders:
            for terms in passes.step(batches, objective, scale_loss, gradient_sync):
                losses.add(terms)
            losses.add_row_losses(recorders, batches)
        self._finish_passes()
        if missing := sorted(self._find_weights_without_gradient()):
            raise MegatfmError(
                f"no loss depends on {', '.join(missing[:3])} ({len(missing)} of the weights here): leave their part "
                "out of [model], or choose an objective that trains it. A part that some micro-batches don't reach "
                "must give its weights a gradient of 0, for example by adding 0 · weight.sum() to its output"
            )
        gradients = self.gradients()
        self.ties.all_reduce_gradients(gradients)
        all_reduce_partial_gradients(gradients, self.layout, self.mesh)
        if self.loss_scale and gradients:
            torch._foreach_mul_(list(gradients.values()), 1 / self.loss_scale.value)
        totals = losses.compute_totals()
        self.pending_losses = totals, losses.summed
        return totals

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """See `Engine.evaluate`."""
        self._set_training(False)
        losses = LossAccumulator(objective, self.mesh, self.device)
        with self.state.averaged_weights(self._sync_trained_weights):
            if compares_samples(objective):
                losses.add(self._compare_samples(self._iter_counted(batches, losses), objective))
            else:
                for batch in self._iter_counted(batches, losses):
                    losses.add(self._evaluate_batch(batch, objective))
        losses.sum_counts()
        return losses.compute_totals()

    def _iter_counted(self, batches: Iterable[Arrays], losses: LossAccumulator) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's tokens of each micro-batch on the device, and count its targets."""
        for microbatch in batches:
            losses.count_local([microbatch])
            yield make_local_batch(microbatch, self.device, self.layout)

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """See `Engine.layer_statistics`. A collective."""
        return self.layer_stats.measure(self.local, self.gradients(), self.module_state.statistics())

    def zero_grad(self) -> None:
        """See `Engine.zero_grad`."""
        self._drop_gradients()
        self.module_state.reset()
        self.pending_losses = None

    def weights(self) -> Mapping[str, ShardedTensor]:
        """See `Engine.weights`."""
        return self.state.weights

    def sync_weights(self) -> None:
        """See `Engine.sync_weights`."""
        self.state.refresh()
        self._sync_all_weights()

    def state_dict(self) -> StateDict:
        """See `TrainState`."""
        return self.state.state_dict()

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """See `TrainState`."""
        return self.state.empty_state_dict(stored)

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Load the optimizer state and the loss scale; the weights are already in place. See `TrainState`."""
        self.state.load_state_dict(state)
        self._sync_all_weights()

    def process_groups(self) -> Mapping[str, str]:
        """See `Engine.process_groups`."""
        ties = {str(group.group_name): PIPELINE for group in (*self.pipeline_groups, *self.ties.groups)}
        data_axes = {layout.data_axes for layout in self.layout.values()}
        joint = {axes for data in data_axes for axes in (data.all, data.shard)}
        joint = {axes for axes in joint if sum(self.mesh.size(axis) > 1 for axis in axes) > 1}
        return ties | self.mesh.group_names(self.mesh.shard_axes, self.mesh.batch_axes, *sorted(joint))


def materialize(
    model: nn.Module, precision: Precision, device: torch.device, gradients: torch.dtype | None = None
) -> None:
    """Allocate the meta tensors of a model, uninitialised: parameters in the compute dtype, buffers in the stored one.

    gradients: dtype of the parameters' gradients; None: the stored one.
    """
    for parameter in list(model.parameters()):
        allocated = nn.Parameter(
            torch.empty_like(parameter, dtype=precision.compute_dtype, device=device), parameter.requires_grad
        )
        if is_fake(allocated):  # torch can't swap fake tensors
            parameter = _replace_parameter(model, parameter, allocated)
        else:
            swap_tensors(parameter, allocated)  # in place, so that ties stay tied
        if precision.is_mixed:
            parameter.grad_dtype = gradients or precision.param_dtype
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            dtype = precision.param_dtype if buffer.is_floating_point() else buffer.dtype
            vars(module)["_buffers"][key] = torch.empty_like(buffer, dtype=dtype, device=device)


def _replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Replace a parameter in all modules that have it, and return the new one."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, key, new)
    return new


@torch.no_grad()
def init_weights(model: nn.Module, layout: ModelLayout, weights: Mapping[str, ShardedTensor], seed: int) -> None:
    """Draw the initial values of this rank's blocks of the weights, and of its buffers."""
    threads = count_threads()
    for name, tensor, initial in iter_inits(model):
        if name in weights:
            blocks = weights[name].blocks
        else:
            buffer = layout.buffers[name]
            blocks = [ShardedTensor(tensor, buffer.shape, buffer.region[0])]
        for block in blocks:
            if is_fake(block.tensor):
                continue
            sizes = tuple(block.tensor.shape)
            block.tensor.copy_(draw(initial, seed, name, block.global_shape, block.offsets, sizes, threads))


def count_threads() -> int:
    """Return a process's share of the cores that it may run on, at least torch's own number of threads.

    torchrun sets torch to one thread a process; launchers say how many processes run on this machine.
    """
    local_ranks = count_local_ranks(os.environ)
    if not local_ranks or not hasattr(os, "sched_getaffinity"):
        return torch.get_num_threads()
    return max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // local_ranks)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the inputs of blocks to the compute dtype by hooks, as FSDP2 does: a bias may come from a buffer."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for block in iter_blocks(model):
        block.register_forward_pre_hook(hook, with_kwargs=True)


def make_optimizers(
    groups: Sequence[OptimizerGroup],
    weights: Mapping[str, ShardedTensor],
    layout: ModelLayout,
    mesh: Mesh,
    zero_dims: Mapping[str, int] | None = None,
) -> list[ElementwiseOptimizer | WholeTensorOptimizer]:
    """Build an optimizer for each group, over this rank's blocks or over the whole tensors that it owns. A collective.

    weights: this rank's blocks. zero_dims: weight → the dim that the ranks of its `data_axes.shard` divide in equal
    rows; others have it whole. Raises MegatfmError for a block that lies elsewhere.
    """
    zero_dims, positions = zero_dims or {}, mesh.positions(mesh.shard_axes)
    optimizers: list[ElementwiseOptimizer | WholeTensorOptimizer] = []
    for group in groups:
        blocks = {name: weights[name] for name in group.names if name in weights}
        local = {name: block.tensor for name, block in blocks.items()}
        if group.granularity == "elementwise":
            elementwise = ElementwiseOptimizer(group, local)
            elementwise.set_shard_locations(
                {n: ShardLocation(n, block.global_shape, block.offsets) for n, block in blocks.items()}
            )
            optimizers.append(elementwise)
            continue
        if not blocks:  # all of them belong to other pipeline stages
            optimizers.append(ElementwiseOptimizer(group, local))
            continue
        regions = {name: layout[name].compute_regions(mesh, zero_dims.get(name), positions) for name in blocks}
        for name, block in blocks.items():
            expected = regions[name][positions.index(mesh.position)]
            region = block.offsets, tuple(block.tensor.shape)
            if region != expected:
                raise MegatfmError(
                    f"this rank has the block {region} (offsets, sizes) of {name}, but its layout says {expected}: an "
                    "engine passes the dims that its data ranks shard as zero_dims"
                )
        shapes = {name: block.global_shape for name, block in blocks.items()}
        optimizers.append(WholeTensorOptimizer(group, local, regions, shapes, mesh.flat_group(mesh.shard_axes)))
    return optimizers
