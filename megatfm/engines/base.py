"""Base of the engines: the steps that they take alike, and the preparation before the first one."""

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
    LossScale,
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
    check_first_pass,
    local_batch,
    recorded_row_losses,
)
from megatfm.engines.optimizers import ElementwiseOptimizer, WholeTensorOptimizer
from megatfm.engines.passes import ForwardBackward, GradientSync, LossScaler
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.engines.state import ModuleState, StatefulOptimizer, TiedParameters, TrainState
from megatfm.errors import MegatfmError
from megatfm.layers.initialisation import draw, iter_inits
from megatfm.layers.output_head import LMHead
from megatfm.ops.deferred_reads import DeferredReads
from megatfm.ops.torch_private import is_fake
from megatfm.parallel.layout import ModelLayout, transformer_blocks
from megatfm.parallel.mesh import PIPELINE, DataAxes, Mesh, sort_axes
from megatfm.parallel.pipeline_stages import Pipeline


class BaseEngine:
    """The steps that every engine of blocks of weights takes alike: passes, sums over axes, checks, state (see
    `Engine`).

    A subclass says how its backward passes reduce gradients (`_prepare_passes`), where its gradients are (`gradients`),
    how it moves weights (`step`), and the work after weights were set (`_weights_were_set`). It calls `_build_state`
    once its weights exist.
    """

    layout: ModelLayout
    mesh: Mesh
    device: torch.device
    precision: Precision
    pipeline: Pipeline | None
    loss_scale: LossScale | None
    state: TrainState
    local: dict[str, Tensor]
    """This rank's blocks of the weights, as the optimizer moves them."""
    passes: ForwardBackward

    def _build_state(
        self,
        model: nn.Module,
        weights: Mapping[str, ShardedTensor],
        optimizers: Sequence[StatefulOptimizer],
        ties: TiedParameters,
        *,
        sharded: bool,
        copies: bool = False,
        compiled: bool = False,
    ) -> None:
        """Set up the state that is summed or saved besides gradients. sharded, copies: see `GlobalNorm`. A
        collective."""
        self.ties = ties
        self.module_state = ModuleState(model, self.layout, self.mesh, ties)
        self.state = TrainState({**weights, **self.module_state.boxes}, optimizers, self.loss_scale)
        self.distinct = GlobalNorm(
            self.layout, self.mesh, self.device, sharded=sharded, copies=copies, is_counted=ties.is_owner
        )
        self.norms = LayerStatistics(model, self.layout, self.mesh, self.distinct, compiled=compiled)
        self.reads = DeferredReads()
        self.pending_losses: tuple[LossTotals, Tensor] | None = None
        """The losses whose gradients wait for a step, for the host and on the device."""
        self.pipeline_groups: list[ProcessGroup] = []
        self._heads = [module for module in model.modules() if isinstance(module, LMHead)]

    def _build_pipeline(self, model: nn.Module, pipeline: Pipeline) -> ForwardBackward:
        """The passes of a pipeline, with a group for each direction. A collective."""
        self.pipeline_groups = [self.mesh.group(PIPELINE), self.mesh.new_group_along(PIPELINE)]
        dtype = self.precision.compute_dtype
        return PipelineForwardBackward(
            model, pipeline, *self.pipeline_groups, dtype=dtype, device=self.device
        )

    def _set_training(self, training: bool) -> None:
        raise NotImplementedError

    def _prepare_passes(
        self, losses: LossAccumulator, record_activations: bool
    ) -> tuple[ForwardBackward, LossScaler, GradientSync]:
        """The functions of a step's passes: how they run, the factor of their losses, and the reduction of
        gradients."""
        raise NotImplementedError

    def _finish_passes(self) -> None:
        """`gradients` are summed over the data axes, scaled by the loss scale."""
        raise NotImplementedError

    def _evaluate_batch(self, batch: Batch, objective: LossFunction) -> Mapping[str, Tensor]:
        return self.passes.evaluate(batch, objective)

    def _compare_samples(self, batches: Iterable[Batch], objective: ComparingLoss) -> Mapping[str, Tensor]:
        """The terms of all samples of some micro-batches; for engines with the feature "compares_samples"."""
        raise NotImplementedError

    def _without_gradient(self) -> Collection[str]:
        """Trained weights that no pass of a step has reached."""
        raise NotImplementedError

    def _forget_gradients(self) -> None:
        raise NotImplementedError

    def _weights_were_moved(self) -> None:
        """Set the model's compute weights from `local`, except frozen ones."""
        raise NotImplementedError

    def _weights_were_set(self) -> None:
        """Set the weights that the model computes with from all weights."""
        raise NotImplementedError

    def _copied_axes(self, data_axes: DataAxes) -> Sequence[str]:
        """Data axes whose ranks hold copies of a weight's block."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """This rank's blocks of all gradients, complete over every axis after `forward_backward`."""
        raise NotImplementedError

    @property
    def replicated_axes(self) -> Sequence[str]:
        """Axes over which ranks hold copies of the same blocks, of weights or of modules' state."""
        weights = {axis for layout in self.layout.values() for axis in self._copied_axes(layout.data_axes)}
        return sort_axes(
            weights | {axis for layout in self.layout.state.values() for axis in layout.data_axes.all}
        )

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """Accumulate the gradient of the global batch's loss over this rank's micro-batches: once before a step."""
        check_first_pass(self.pending_losses)
        self._set_training(True)
        self.norms.watch(record_activations)
        batches = [local_batch(batch, self.device, self.layout) for batch in microbatches]
        losses = LossAccumulator(objective, self.mesh, self.device, self.reads, sources)
        losses.count(microbatches)
        passes, scale_loss, data = self._prepare_passes(losses, record_activations)
        with recorded_row_losses(self._heads if sources else []) as recorders:
            for terms in passes.step(batches, objective, scale_loss, data):
                losses.add(terms)
            losses.add_row_losses(recorders, batches)
        self._finish_passes()
        if missing := sorted(self._without_gradient()):
            raise MegatfmError(
                f"no loss depends on {', '.join(missing[:3])} ({len(missing)} of the weights here): leave their part "
                "out of [model], or take an objective that trains it; a part that some micro-batches don't reach must "
                "give them a gradient of 0, for example by adding 0 · weight.sum() to its output"
            )
        gradients = self.gradients()
        self.ties.all_reduce_gradients(gradients)
        all_reduce_partial_gradients(gradients, self.layout, self.mesh)
        if self.loss_scale and gradients:
            torch._foreach_mul_(list(gradients.values()), 1 / self.loss_scale.value)
        totals = losses.result()
        self.pending_losses = totals, losses.summed
        return totals

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """The loss over batches, of which every rank must bring equally many."""
        self._set_training(False)
        losses = LossAccumulator(objective, self.mesh, self.device)
        with self.state.averaged_weights(self._weights_were_moved):
            if compares_samples(objective):
                losses.add(self._compare_samples(self._counted(batches, losses), objective))
            else:
                for batch in self._counted(batches, losses):
                    losses.add(self._evaluate_batch(batch, objective))
        losses.sum_counts()
        return losses.result()

    def _counted(self, batches: Iterable[Arrays], losses: LossAccumulator) -> Iterator[dict[str, Tensor]]:
        """Yield micro-batches as they are on this rank, and count their targets."""
        for microbatch in batches:
            losses.count_here([microbatch])
            yield local_batch(microbatch, self.device, self.layout)

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """After `forward_backward`: see `LayerStatistics`, and what stateful modules measure. A collective."""
        return self.norms.measure(self.local, self.gradients(), self.module_state.statistics())

    def zero_grad(self) -> None:
        """Forget the gradients, and what modules observed."""
        self._forget_gradients()
        self.module_state.forget()
        self.pending_losses = None

    def weights(self) -> Mapping[str, ShardedTensor]:
        """This rank's blocks, in the stored precision, and the state of modules."""
        return self.state.weights

    def weights_changed(self) -> None:
        """Update copies of the weights, after these were set from outside."""
        self.state.refresh()
        self._weights_were_set()

    def state_dict(self) -> StateDict:
        """See `TrainState`."""
        return self.state.state_dict()

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Return empty tensors for the contents of a checkpoint (name → dtype, global shape): weights in place, fresh
        optimizer state."""
        return self.state.empty_state_dict(stored)

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over what `empty_state_dict` returned and a checkpoint filled (the weights already are in place)."""
        self.state.load_state_dict(state)
        self._weights_were_set()

    def process_groups(self) -> Mapping[str, str]:
        """Groups of the axes, of what reduces or gathers over several, and of ties between pipeline ranks."""
        ties = {str(group.group_name): PIPELINE for group in (*self.pipeline_groups, *self.ties.groups)}
        data = {layout.data_axes.all for layout in self.layout.values()}
        return ties | self.mesh.group_names(self.mesh.shard_axes, self.mesh.data_axes, *sorted(data))


def materialize(
    model: nn.Module, precision: Precision, device: torch.device, gradients: torch.dtype | None = None
) -> None:
    """Give meta tensors memory, not yet set: parameters in the compute dtype, their gradients in the parameters' stored
    dtype, or in `gradients`."""
    for parameter in list(model.parameters()):
        real = nn.Parameter(
            torch.empty_like(parameter, dtype=precision.compute_dtype, device=device), parameter.requires_grad
        )
        if is_fake(real):  # torch swaps no tensor that has a shape alone
            parameter = _replace_parameter(model, parameter, real)
        else:
            swap_tensors(parameter, real)  # in place, so that ties stay tied
        if precision.is_mixed:
            parameter.grad_dtype = gradients or precision.param_dtype
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            dtype = precision.param_dtype if buffer.is_floating_point() else buffer.dtype
            vars(module)["_buffers"][key] = torch.empty_like(buffer, dtype=dtype, device=device)


def _replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Replace a parameter in all modules that have it."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(module, key, new)
    return new


@torch.no_grad()
def init_weights(
    model: nn.Module, layout: ModelLayout, weights: Mapping[str, ShardedTensor], seed: int
) -> None:
    """Set this rank's blocks of the weights, and its buffers, to their initial values."""
    threads = threads_per_process()
    for name, tensor, initial in iter_inits(model):
        if name in weights:
            parts = weights[name].blocks
        else:
            placement = layout.buffers[name]
            parts = [ShardedTensor(tensor, placement.shape, placement.region[0])]
        for box in parts:
            if is_fake(box.tensor):
                continue  # a shape has no values
            sizes = tuple(box.tensor.shape)
            box.tensor.copy_(draw(initial, seed, name, box.global_shape, box.offsets, sizes, threads))


def threads_per_process() -> int:
    """This process's share of the cores that it may run on. torchrun gives torch one thread a process whatever there
    is, but says how many processes run on this machine."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    has_affinity = local_ranks and hasattr(os, "sched_getaffinity")
    share = len(os.sched_getaffinity(0)) // local_ranks if has_affinity else 0
    return max(torch.get_num_threads(), share)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have blocks cast their inputs to the compute dtype, as FSDP2 does: a bias may come from a buffer."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for block in transformer_blocks(model):
        block.register_forward_pre_hook(hook, with_kwargs=True)


def make_optimizers(
    groups: Sequence[OptimizerGroup], weights: Mapping[str, ShardedTensor], mesh: Mesh
) -> list[ElementwiseOptimizer | WholeTensorOptimizer]:
    """Make optimizers over this rank's blocks, or over whole tensors, which the ranks that hold their blocks divide
    among themselves. A collective."""
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
        chunks = {name: (block.offsets, tuple(block.tensor.shape)) for name, block in blocks.items()}
        chunks_by_rank = mesh.gather_objects(chunks, mesh.shard_axes)
        if not blocks:  # all of them are of other pipeline stages
            optimizers.append(ElementwiseOptimizer(group, local))
            continue
        boxes = {name: [chunks[name] for chunks in chunks_by_rank] for name in blocks}
        shapes = {name: block.global_shape for name, block in blocks.items()}
        optimizers.append(WholeTensorOptimizer(group, local, boxes, shapes, mesh.flat_group(mesh.shard_axes)))
    return optimizers
