"""DeepSpeed's ZeRO behind our protocol: it gathers weights, reduces gradients and steps; the rest is as under native.

What is ours: initial weights, the plan's tensor parallelism, the loss over the global batch, the norm (in float64, each
element once), clipping, the choice to leave a step out, float16's loss scale, and checkpoints.
"""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.checkpoint import FlatShardedTensor, ShardedTensor
from megatfm.config.deepspeed import precision_problem
from megatfm.engines.deepspeed.groups import parameter_groups, require_single_group
from megatfm.engines.deepspeed.library import (
    ModelParallelUnit,
    allow_fp16_on_cpu,
    clear_module_stack,
    load,
    quiet,
    register_experts,
    release,
)
from megatfm.engines.deepspeed.optimizer import FlatOptimizer
from megatfm.engines.deepspeed.partitions import partitions
from megatfm.engines.deepspeed.passes import AccumulationBoundary, DeepSpeedForwardBackward, ModelWrapper
from megatfm.engines.deepspeed.settings import settings
from megatfm.engines.distinct import GlobalNorm, all_reduce_partial_gradients, clip_gradients
from megatfm.engines.interface import (
    MOMENTS,
    Arrays,
    EngineSetup,
    LossFunction,
    LossTotals,
    MemoryNeeds,
    StateDict,
)
from megatfm.engines.layer_statistics import LayerStatistics
from megatfm.engines.loss_scale import LossScale
from megatfm.engines.losses import DeferredReads, LossAccumulator, check_first_pass, local_batch
from megatfm.engines.module_state import ModuleState
from megatfm.engines.passes import ForwardBackward
from megatfm.engines.pipelined import PipelineForwardBackward, max_block_inputs
from megatfm.engines.precision import PRECISIONS
from megatfm.engines.prepare import cast_inputs, init_weights, materialize
from megatfm.engines.recompute import recompute
from megatfm.engines.state import TrainState
from megatfm.engines.ties import TiedParameters
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.mesh import PIPELINE, sort_axes


class DeepSpeedEngine:
    """See `interface.Engine`."""

    def __init__(self, setup: EngineSetup) -> None:
        config, mesh = setup.config, setup.mesh
        self.zero: int = config.parallel.zero
        if problem := precision_problem(config.parallel, setup.precision):
            raise UsageError(f"parallel.engine = 'deepspeed' with {problem}, or parallel.engine = 'native'")
        group = require_single_group(setup.optimizers)
        self.layout, self.mesh, self.device = setup.layout, mesh, setup.device
        self.model, self.precision = setup.model, PRECISIONS[setup.precision]
        self.loss_scale = LossScale() if setup.precision == "fp16" else None
        package = load(setup.device)
        ds_config = settings(config, setup, package)
        recompute(self.model, transformer_blocks(self.model), config.train.recompute)
        materialize(self.model, self.precision, self.device, gradients=self.precision.compute_dtype)
        if self.precision.is_mixed:
            cast_inputs(self.model, self.precision.compute_dtype)
        self.parameters = dict(self.model.named_parameters())
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        for parameter in trained.values():
            # Or DeepSpeed's own norm, by which it only tells what is finite, leaves them out on some ranks.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.ties = TiedParameters(setup.pipeline, mesh)
        names, options = parameter_groups(group, trained, self.layout, setup.pipeline)
        sign = register_experts(self.parameters, self.layout, mesh, self.zero)
        with (
            quiet(),
            allow_fp16_on_cpu(),
            redirect_stdout(StringIO()),
        ):  # of bf16 it prints how much memory there is
            self.engine, *_ = package.initialize(
                model=ModelWrapper(self.model, sign),
                optimizer=group.build(options),
                config=ds_config.json,
                mpu=ModelParallelUnit(mesh),
            )
        self.partitions = partitions(self.engine, self.parameters, names, self.zero)
        weakref.finalize(self, release, self.engine).atexit = False
        weakref.finalize(self, ds_config.remove)
        self._watch_gradients(trained)
        weights = self._weights()
        init_weights(self.model, self.layout, weights, config.train.seed)
        self.optimizer = FlatOptimizer(self.engine.basic_optimizer, self.partitions, group)
        self.module_state = ModuleState(self.model, self.layout, mesh, self.ties)
        boxes = {**weights, **self.module_state.boxes}
        self.state = TrainState(boxes, [self.optimizer], self.loss_scale)
        self.local = {name: box.tensor for name, box in weights.items()}
        cut, counted = self.zero > 0, self.ties.is_owner
        self.distinct = GlobalNorm(self.layout, mesh, self.device, sharded=cut, copies=True, counted=counted)
        self.norms = LayerStatistics(self.model, self.layout, mesh, self.distinct, compiled=False)
        self.reads = DeferredReads()
        self.pipeline = setup.pipeline
        self.passes: ForwardBackward = DeepSpeedForwardBackward(self.engine, self.model)
        self.pipeline_groups: list[ProcessGroup] = []
        if setup.pipeline:
            self.pipeline_groups = [mesh.group(PIPELINE), mesh.new_group_along(PIPELINE)]
            dtype = self.precision.compute_dtype
            self.passes = PipelineForwardBackward(
                self.model, setup.pipeline, *self.pipeline_groups, dtype=dtype, device=self.device
            )
        self.offload = config.deepspeed.offload_optimizer
        waits = self.zero == 3 and self.offload != "none"
        self.boundaries = AccumulationBoundary(self.engine, defers_offload=waits)
        self.pending_losses: LossTotals | None = None
        self.weights_changed()

    def _weights(self) -> dict[str, ShardedTensor]:
        """This rank's blocks: of frozen weights all that tensor parallelism leaves here."""
        weights: dict[str, ShardedTensor] = {}
        for name in self.parameters:
            placement = self.layout[name]
            offsets, sizes = placement.region
            if part := self.partitions.parts.get(name):
                weights[name] = FlatShardedTensor(part.weights, placement.shape, offsets, sizes, part.offset)
            else:
                stored = torch.empty(sizes, dtype=self.precision.param_dtype, device=self.device)
                weights[name] = ShardedTensor(stored, placement.shape, offsets)
        return weights

    def _watch_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._reached: set[str] = set()
        reached = self._reached  # not self, which hooks would keep
        for name, parameter in trained.items():
            parameter.register_hook(lambda _, name=name: reached.add(name))

    @property
    def replicated_axes(self) -> Sequence[str]:
        state = {axis for placement in self.layout.state.values() for axis in placement.data_axes.all}
        weights = {axis for placement in self.layout.values() for axis in placement.data_axes.all}
        return sort_axes(state if self.zero else state | weights)

    def forward_backward(
        self, microbatches: Sequence[Arrays], objective: LossFunction, *, record_activations: bool = False
    ) -> LossTotals:
        """Accumulate the gradient of the global batch's loss over this rank's micro-batches: once before a step."""
        check_first_pass(self.pending_losses)
        self.engine.train()
        self.norms.watch(record_activations)
        batches = [local_batch(batch, self.device, self.layout) for batch in microbatches]
        losses = LossAccumulator(objective, self.mesh, self.device, self.reads)
        losses.count(microbatches)
        scale = self.loss_scale.value if self.loss_scale else 1.0
        # Stage 3 takes the mean over data ranks; a global loss is a sum.
        factor = scale * (self.mesh.gradient_ranks if self.zero == 3 else 1)
        shares = losses.shares()

        def weigh(terms: Mapping[str, Tensor]) -> Tensor:
            return shares(terms) * factor

        with quiet():
            for terms in self.passes.step(batches, objective, weigh, self.boundaries):
                losses.add(terms)
            if self.pipeline:
                self.boundaries.reduce()
        clear_module_stack()
        gradients = self.gradients()
        self._all_have_gradients()
        self.ties.all_reduce_gradients(gradients)
        all_reduce_partial_gradients(gradients, self.layout, self.mesh)
        if scale != 1 and gradients:
            torch._foreach_mul_(list(gradients.values()), 1 / scale)
        self.pending_losses = losses.result()
        return self.pending_losses

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """See `Engine.step`. Gradients that are not finite lower float16's loss scale, whether or not the step is
        skipped."""
        gradients = self.gradients()
        (norm,) = self.reads.defer(self.distinct.norm(gradients)[None])()
        gradients_are_finite = math.isfinite(norm)
        if skip or (self.pending_losses and not math.isfinite(self.pending_losses.loss)):
            norm = math.nan
        if math.isfinite(norm):
            clip_gradients(gradients, norm, clip)
            self.optimizer.set_lr(lr)
            self.partitions.prepare_step()
            with quiet():
                self.engine.step()
            if not self.engine.was_step_applied():  # its own norm, in float32, overflowed
                norm, gradients_are_finite = math.inf, False
        if self.loss_scale:
            self.loss_scale.update(gradients_are_finite)
        if math.isfinite(norm):
            self.module_state.update()
        self.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """The loss over batches, of which every rank must bring equally many."""
        self.engine.eval()
        losses = LossAccumulator(objective, self.mesh, self.device)
        with self.state.averaged_weights(self.partitions.weights_changed):
            for microbatch in batches:
                with quiet():
                    losses.add(
                        self.passes.evaluate(local_batch(microbatch, self.device, self.layout), objective)
                    )
                losses.count_here([microbatch])
        losses.sum_counts()
        return losses.result()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of all gradients, flattened; complete over every axis after `forward_backward`."""
        return self.partitions.gradients()

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """After `forward_backward`: see LayerStatistics, and what stateful modules tell. A collective."""
        return self.norms.measure(self.local, self.gradients(), self.module_state.statistics())

    def zero_grad(self) -> None:
        """Forget the gradients, and what modules observed."""
        self.partitions.forget()
        self.module_state.forget()
        self._reached.clear()
        self.pending_losses = None

    def weights(self) -> Mapping[str, ShardedTensor]:
        """This rank's parts, in the stored precision, and the state of modules."""
        return self.state.weights

    @torch.no_grad()
    def weights_changed(self) -> None:
        """What the model computes with follows the parts, and the frozen weights."""
        self.partitions.weights_changed()
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                self.partitions.set_frozen(parameter, self.local[name])

    def state_dict(self) -> StateDict:
        """See `TrainState`."""
        return self.state.state_dict()

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Room for what a checkpoint holds (name → dtype, global shape): weights in place, fresh optimizer state."""
        return self.state.empty_state_dict(stored)

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over what `empty_state_dict` made and a checkpoint filled (the weights already are in place)."""
        self.state.load_state_dict(state)
        self.weights_changed()

    def memory_needed(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """Stages 0 and 1 keep whole gradients, and stage 3 gathers a block at a time. What is offloaded is elsewhere,
        unless the device is the host; what is in files is nowhere."""
        on_host = self.offload != "none" and self.device.type != "cpu"
        whole = sum(math.prod(self.layout[name].region[1]) for name in self.partitions.parts)
        own = sum(part.size for part in self.partitions.parts.values()) * self.precision.param_dtype.itemsize
        sizes = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(self.model)]
        return MemoryNeeds(
            gradients=own * (not on_host)
            if self.zero >= 2
            else whole * self.precision.compute_dtype.itemsize,
            optimizer_state=0 if on_host or self.offload == "nvme" else MOMENTS * own,
            gathered=whole // max(1, len(sizes)) * self.precision.compute_dtype.itemsize
            if self.zero == 3
            else 0,
            block_inputs=max_block_inputs(self.pipeline, self.mesh.rank(PIPELINE), microbatches, len(sizes))
            * block_input,
        )

    def process_groups(self) -> Mapping[str, str]:
        """DeepSpeed is handed ours."""
        ties = {str(group.group_name): PIPELINE for group in (*self.pipeline_groups, *self.ties.groups)}
        data = {placement.data_axes.all for placement in self.layout.values()}
        return ties | self.mesh.group_names(self.mesh.shard_axes, self.mesh.data_axes, *sorted(data))

    def _all_have_gradients(self) -> None:
        if missing := sorted(self.partitions.parts.keys() - self._reached):
            raise MegatfmError(
                f"no loss depends on {', '.join(missing[:3])} ({len(missing)} of the weights here): leave their part "
                "out of [model], or take an objective that trains it; a part that some micro-batches don't reach must "
                "give them a gradient of 0, for example by adding 0 · weight.sum() to its output"
            )
