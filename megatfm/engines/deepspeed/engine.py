"""DeepSpeed's ZeRO as an engine: DeepSpeed gathers weights, reduces gradients and runs the optimizer.

Initial weights, tensor parallelism, the loss over the global batch, the norm (in float64, each element once),
clipping, skipped steps, float16's loss scale and checkpoints are those of the native engine.
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
from megatfm.config.deepspeed import find_precision_problem
from megatfm.engines.activation_checkpointing import recompute
from megatfm.engines.base import BaseEngine, cast_inputs, init_weights, materialize
from megatfm.engines.deepspeed.internals import (
    allow_fp16_on_cpu,
    build_partitions,
    clear_module_stack,
    ignore_warnings,
    register_experts,
    release,
)
from megatfm.engines.deepspeed.library import (
    import_deepspeed,
    make_ds_config,
    make_mpu,
    require_single_group,
    split_param_groups,
)
from megatfm.engines.deepspeed.partitions import FlatOptimizer
from megatfm.engines.gradients import clip_gradients
from megatfm.engines.interface import (
    MOMENTS,
    PRECISIONS,
    Arrays,
    Batch,
    EngineSetup,
    LossFunction,
    LossTotals,
    MemoryNeeds,
    RowSources,
)
from megatfm.engines.losses import LossAccumulator, LossScale
from megatfm.engines.passes import ForwardBackward, GradientSync, LossScaler, Terms
from megatfm.engines.pipeline import check_split_backward, count_max_block_inputs
from megatfm.engines.state import TiedParameters
from megatfm.errors import UsageError
from megatfm.parallel.layout import iter_blocks
from megatfm.parallel.mesh import PIPELINE, DataAxes


class DeepSpeedEngine(BaseEngine):
    """Runs training steps by DeepSpeed: see `interface.Engine`."""

    def __init__(self, setup: EngineSetup) -> None:
        config, mesh = setup.config, setup.mesh
        self.zero: int = config.parallel.zero
        if problem := find_precision_problem(config.parallel, setup.precision):
            raise UsageError(f"parallel.engine = 'deepspeed' with {problem}, or parallel.engine = 'native'")
        group = require_single_group(setup.optimizers)
        self.layout, self.mesh, self.device = setup.layout, mesh, setup.device
        self.model, self.precision = setup.model, PRECISIONS[setup.precision]
        self.loss_scale = LossScale() if setup.precision == "fp16" else None
        package = import_deepspeed(setup.device)
        ds_config, offload_directory = make_ds_config(config, setup, package)
        check_split_backward(setup.pipeline, config.train.recompute)
        recompute(self.model, iter_blocks(self.model), config.train.recompute)
        materialize(self.model, self.precision, self.device, gradients=self.precision.compute_dtype)
        if self.precision.is_mixed:
            cast_inputs(self.model, self.precision.compute_dtype)
        self.parameters = dict(self.model.named_parameters())
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        for parameter in trained.values():
            # DeepSpeed checks by its own norm that gradients are finite; without this, some ranks leave them out.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        ties = TiedParameters(setup.pipeline, mesh)
        names, options = split_param_groups(group, trained, self.layout, setup.pipeline)
        moe_marker = register_experts(self.parameters, self.layout, mesh, self.zero)
        # DeepSpeed prints memory statistics with bf16.
        with ignore_warnings(), allow_fp16_on_cpu(), redirect_stdout(StringIO()):
            self.ds_engine, *_ = package.initialize(
                model=ModelWrapper(self.model, moe_marker),
                optimizer=group.build(options),
                config=ds_config,
                mpu=make_mpu(mesh),
            )
        self.partitions = build_partitions(self.ds_engine, self.parameters, names, self.zero)
        weakref.finalize(self, release, self.ds_engine).atexit = False
        if offload_directory:
            weakref.finalize(self, offload_directory.remove)
        self._watch_gradients(trained)
        weights = self._make_weights()
        init_weights(self.model, self.layout, weights, config.train.seed)
        self.optimizer = FlatOptimizer(self.ds_engine.basic_optimizer, self.partitions, group)
        self.local = {name: block.tensor for name, block in weights.items()}
        self._build_state(self.model, weights, [self.optimizer], ties, sharded=self.zero > 0, shards_replicas=True)
        self.pipeline = setup.pipeline
        self.passes = DeepSpeedForwardBackward(self.ds_engine, self.model)
        if setup.pipeline:
            self.passes = self._build_pipeline(self.model, setup.pipeline)
        self.offload = config.deepspeed.offload_optimizer
        defers_offload = self.zero == 3 and self.offload != "none"
        self.boundaries = AccumulationBoundary(self.ds_engine, defers_offload=defers_offload)
        self.sync_weights()

    def _make_weights(self) -> dict[str, ShardedTensor]:
        """Return this rank's blocks: partitions of trained weights, and its tensor-parallel shards of frozen ones."""
        weights: dict[str, ShardedTensor] = {}
        for name in self.parameters:
            layout = self.layout[name]
            offsets, sizes = layout.region
            if partition := self.partitions.by_name.get(name):
                weights[name] = FlatShardedTensor(partition.weights, layout.shape, offsets, sizes, partition.offset)
            else:
                stored = torch.empty(sizes, dtype=self.precision.param_dtype, device=self.device)
                weights[name] = ShardedTensor(stored, layout.shape, offsets)
        return weights

    def _watch_gradients(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._reached: set[str] = set()
        reached = self._reached  # hooks that refer to self would keep it alive
        for name, parameter in trained.items():
            parameter.register_hook(lambda _, name=name: reached.add(name))

    def _get_replicated_data_axes(self, data_axes: DataAxes) -> Sequence[str]:
        return () if self.zero else data_axes.all

    def _set_training(self, training: bool) -> None:
        self.ds_engine.train(training)

    def forward_backward(
        self,
        microbatches: Sequence[Arrays],
        objective: LossFunction,
        *,
        record_activations: bool = False,
        sources: RowSources | None = None,
    ) -> LossTotals:
        """See `Engine.forward_backward`."""
        with ignore_warnings():
            return super().forward_backward(
                microbatches, objective, record_activations=record_activations, sources=sources
            )

    def _prepare_passes(
        self, losses: LossAccumulator, record_activations: bool
    ) -> tuple[ForwardBackward, LossScaler, GradientSync]:
        weights = losses.compute_term_weights()
        # Stage 3 averages over data ranks, but the gradient of the global loss is a sum.
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
        with ignore_warnings():
            return self.passes.evaluate(batch, objective)

    def _find_weights_without_gradient(self) -> Collection[str]:
        return self.partitions.by_name.keys() - self._reached

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """See `Engine.step`. Gradients that are not finite lower float16's loss scale, whether or not the step is
        skipped."""
        gradients = self.gradients()
        (norm,) = self.reads.defer(self.global_norm.compute(gradients)[None])()
        gradients_are_finite = math.isfinite(norm)
        if skip or (self.pending_losses and not math.isfinite(self.pending_losses[0].loss)):
            norm = math.nan
        if math.isfinite(norm):
            clip_gradients(gradients, norm, clip)
            self.optimizer.set_lr(lr)
            self.partitions.prepare_step()
            with ignore_warnings():
                self.ds_engine.step()
            if not self.ds_engine.was_step_applied():  # DeepSpeed's norm, in float32, overflowed
                norm, gradients_are_finite = math.inf, False
        if self.loss_scale:
            self.loss_scale.update(gradients_are_finite)
        if math.isfinite(norm):
            self.module_state.update()
        self.zero_grad()
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """See `Engine.gradients`. Blocks are flat."""
        return self.partitions.gradients()

    def _drop_gradients(self) -> None:
        self.partitions.drop_gradients()
        self._reached.clear()

    def _sync_trained_weights(self) -> None:
        self.partitions.sync_weights()

    @torch.no_grad()
    def _sync_all_weights(self) -> None:
        self.partitions.sync_weights()
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                self.partitions.set_frozen(parameter, self.local[name])

    def estimate_memory(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """See `Engine.estimate_memory`. Stages 0 and 1 keep whole gradients; stage 3 gathers a block at a time.

        Tensors offloaded to the host count only if the device is the host, those in files never.
        """
        on_host = self.offload != "none" and self.device.type != "cpu"
        elements = sum(math.prod(self.layout[name].region[1]) for name in self.partitions.by_name)
        shard = sum(partition.size for partition in self.partitions.by_name.values())
        shard_bytes = shard * self.precision.param_dtype.itemsize
        itemsize = self.precision.compute_dtype.itemsize
        sizes = [sum(p.numel() for p in block.parameters()) for block in iter_blocks(self.model)]
        in_flight = count_max_block_inputs(self.pipeline, self.mesh.rank(PIPELINE), microbatches, len(sizes))
        return MemoryNeeds(
            gradients=shard_bytes * (not on_host) if self.zero >= 2 else elements * itemsize,
            optimizer_state=0 if on_host or self.offload == "nvme" else MOMENTS * shard_bytes,
            gathered=elements // max(1, len(sizes)) * itemsize if self.zero == 3 else 0,
            block_inputs=in_flight * block_input,
        )


class ModelWrapper(nn.Module):
    """Module that DeepSpeed wraps: its forward runs any function of the model, as objectives need."""

    def __init__(self, model: nn.Module, moe_marker: nn.Module | None) -> None:
        super().__init__()
        self.model, self.moe_marker = model, moe_marker

    def forward(self, run: Callable[[nn.Module], Tensor]) -> Tensor:
        """Run a function of the model."""
        return run(self.model)


class DeepSpeedForwardBackward:
    """Forward and backward pass of each micro-batch in turn: see `engines.passes.ForwardBackward`."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine, self._model = engine, model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, gradient_sync: GradientSync
    ) -> list[Terms]:
        terms_by_batch: list[Terms] = []
        for batch in batches:
            gradient_sync.start_microbatch(is_last=batch is batches[-1])

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
    """Tells DeepSpeed which pass is the last of a step, so that it reduces gradients in it or after it.

    defers_offload: copy offloaded gradients in the optimizer step, not in the last pass.
    """

    def __init__(self, engine: Any, *, defers_offload: bool) -> None:
        self._engine, self._defers_offload = engine, defers_offload

    def start_microbatch(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last and not self._defers_offload)

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Accumulate gradients until `reduce`."""
        self._engine.set_gradient_accumulation_boundary(False)
        if hasattr(self._engine.optimizer, "set_gradient_accumulation_boundary"):
            self._engine.optimizer.set_gradient_accumulation_boundary(False)

    def reduce(self) -> None:
        """Sum gradients over data ranks, after the last backward pass of a pipeline."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()
