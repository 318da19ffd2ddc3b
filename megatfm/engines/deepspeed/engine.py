"""DeepSpeed's ZeRO behind our protocol: it gathers weights, reduces gradients and steps; the rest is as under native.

Ours are the initial weights, the plan's tensor parallelism, the loss over the global batch, the norm (in float64, each
element once), clipping, the choice to skip a step, float16's loss scale, and checkpoints.
"""

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.checkpoint import FlatShardedTensor, ShardedTensor
from megatfm.config.deepspeed import precision_problem
from megatfm.engines.activation_checkpointing import recompute
from megatfm.engines.base import BaseEngine, cast_inputs, init_weights, materialize
from megatfm.engines.deepspeed.library import (
    ModelParallelUnit,
    allow_fp16_on_cpu,
    clear_module_stack,
    load,
    parameter_groups,
    quiet,
    register_experts,
    release,
    require_single_group,
    settings,
)
from megatfm.engines.deepspeed.partitions import FlatOptimizer, partitions
from megatfm.engines.gradients import clip_gradients
from megatfm.engines.interface import (
    MOMENTS,
    PRECISIONS,
    Arrays,
    Batch,
    EngineSetup,
    LossFunction,
    LossScale,
    LossTotals,
    MemoryNeeds,
    RowSources,
)
from megatfm.engines.losses import LossAccumulator
from megatfm.engines.passes import ForwardBackward, GradientSync, LossScaler, Terms
from megatfm.engines.pipeline import max_block_inputs
from megatfm.engines.state import TiedParameters
from megatfm.errors import UsageError
from megatfm.parallel.layout import transformer_blocks
from megatfm.parallel.mesh import PIPELINE, DataAxes


class DeepSpeedEngine(BaseEngine):
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
        ties = TiedParameters(setup.pipeline, mesh)
        names, options = parameter_groups(group, trained, self.layout, setup.pipeline)
        moe_marker = register_experts(self.parameters, self.layout, mesh, self.zero)
        # With bf16 it prints how much memory there is.
        with quiet(), allow_fp16_on_cpu(), redirect_stdout(StringIO()):
            self.engine, *_ = package.initialize(
                model=ModelWrapper(self.model, moe_marker),
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
        self.local = {name: block.tensor for name, block in weights.items()}
        self._build_state(self.model, weights, [self.optimizer], ties, sharded=self.zero > 0, copies=True)
        self.pipeline = setup.pipeline
        self.passes = DeepSpeedForwardBackward(self.engine, self.model)
        if setup.pipeline:
            self.passes = self._build_pipeline(self.model, setup.pipeline)
        self.offload = config.deepspeed.offload_optimizer
        defers_offload = self.zero == 3 and self.offload != "none"
        self.boundaries = AccumulationBoundary(self.engine, defers_offload=defers_offload)
        self.weights_changed()

    def _weights(self) -> dict[str, ShardedTensor]:
        """This rank's blocks; of frozen weights, all that tensor parallelism leaves on this rank."""
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

    def _copied_axes(self, data_axes: DataAxes) -> Sequence[str]:
        return () if self.zero else data_axes.all

    def _set_training(self, training: bool) -> None:
        self.engine.train(training)

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """See `Engine.forward_backward`."""
        with quiet():
            return super().forward_backward(
                microbatches, objective, record_activations=record_activations, sources=sources
            )

    def _prepare_passes(
        self, losses: LossAccumulator, record_activations: bool
    ) -> tuple[ForwardBackward, LossScaler, GradientSync]:
        weights = losses.shares()
        # Stage 3 takes the mean over data ranks; a global loss is a sum.
        factor = self.loss_scale.value if self.loss_scale else 1.0
        factor *= self.mesh.gradient_ranks if self.zero == 3 else 1

        def scale_loss(terms: Mapping[str, Tensor]) -> Tensor:
            return weights(terms) * factor

        return self.passes, scale_loss, self.boundaries

    def _finish_passes(self) -> None:
        if self.pipeline:
            self.boundaries.reduce()
        clear_module_stack()

    def _evaluate_batch(self, batch: Batch, objective: LossFunction) -> Mapping[str, Tensor]:
        with quiet():
            return self.passes.evaluate(batch, objective)

    def _without_gradient(self) -> Collection[str]:
        return self.partitions.parts.keys() - self._reached

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """See `Engine.step`. Gradients that are not finite lower float16's loss scale, whether or not the step is
        skipped."""
        gradients = self.gradients()
        (norm,) = self.reads.defer(self.distinct.norm(gradients)[None])()
        gradients_are_finite = math.isfinite(norm)
        if skip or (self.pending_losses and not math.isfinite(self.pending_losses[0].loss)):
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

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of all gradients, flattened; complete over every axis after `forward_backward`."""
        return self.partitions.gradients()

    def _forget_gradients(self) -> None:
        self.partitions.forget()
        self._reached.clear()

    def _weights_were_moved(self) -> None:
        self.partitions.weights_changed()

    @torch.no_grad()
    def _weights_were_set(self) -> None:
        self.partitions.weights_changed()
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                self.partitions.set_frozen(parameter, self.local[name])

    def memory_needed(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """Stages 0 and 1 keep whole gradients, and stage 3 gathers a block at a time. Tensors offloaded to the host
        don't count, unless the device is the host; files never count."""
        on_host = self.offload != "none" and self.device.type != "cpu"
        elements = sum(math.prod(self.layout[name].region[1]) for name in self.partitions.parts)
        shard = sum(part.size for part in self.partitions.parts.values())
        shard_bytes = shard * self.precision.param_dtype.itemsize
        itemsize = self.precision.compute_dtype.itemsize
        sizes = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(self.model)]
        in_flight = max_block_inputs(self.pipeline, self.mesh.rank(PIPELINE), microbatches, len(sizes))
        return MemoryNeeds(
            gradients=shard_bytes * (not on_host) if self.zero >= 2 else elements * itemsize,
            optimizer_state=0 if on_host or self.offload == "nvme" else MOMENTS * shard_bytes,
            gathered=elements // max(1, len(sizes)) * itemsize if self.zero == 3 else 0,
            block_inputs=in_flight * block_input,
        )


class ModelWrapper(nn.Module):
    """The module that DeepSpeed wraps: an objective may use a model in more ways than by its forward."""

    def __init__(self, model: nn.Module, moe_marker: nn.Module | None) -> None:
        super().__init__()
        self.model, self.moe_marker = model, moe_marker

    def forward(self, run: Callable[[nn.Module], Tensor]) -> Tensor:
        """Run a function of the model."""
        return run(self.model)


class DeepSpeedForwardBackward:
    """Forward and backward of each micro-batch in turn: see `engines.passes.ForwardBackward`."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine, self._model = engine, model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        terms_by_batch: list[Terms] = []
        for batch in batches:
            data.begin(is_last=batch is batches[-1])

            def run(model: nn.Module, batch: Batch = batch) -> Tensor:
                terms = objective(model, batch)
                terms_by_batch.append({name: term.detach() for name, term in terms.items()})
                return scale_loss(terms)

            self._engine.backward(self._engine(run), scale_wrt_gas=False)
        return terms_by_batch

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        terms: Terms = {}

        def run(model: nn.Module) -> Tensor:
            terms.update(objective(model, batch))
            return torch.stack(list(terms.values()))

        self._engine(run)
        return terms


class AccumulationBoundary:
    """Tells DeepSpeed which pass is a step's last, in or after which it reduces gradients.

    defers_offload: gradients that it offloads are copied in the step, and not in the last pass.
    """

    def __init__(self, engine: Any, *, defers_offload: bool) -> None:
        self._engine, self._defers_offload = engine, defers_offload

    def begin(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last and not self._defers_offload)

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Gradients add up, whatever the order of the passes."""
        self._engine.set_gradient_accumulation_boundary(False)
        if hasattr(self._engine.optimizer, "set_gradient_accumulation_boundary"):
            self._engine.optimizer.set_gradient_accumulation_boundary(False)

    def reduce(self) -> None:
        """Sum gradients over data ranks, after a pipeline's last backward pass."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()
