"""The native engine: a model whose tensor-parallel plan has been laid, its weights shared over the data axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.distinct import GlobalNorm, all_reduce_partial_gradients, clip_gradients
from megatfm.engines.interface import (
    Arrays,
    LossFunction,
    LossTotals,
    MemoryNeeds,
    OptimizerGroup,
    StateDict,
)
from megatfm.engines.layer_statistics import LayerStatistics
from megatfm.engines.loss_scale import LossScale
from megatfm.engines.losses import DeferredReads, LossAccumulator, check_first_pass, local_batch
from megatfm.engines.module_state import ModuleState
from megatfm.engines.native.data_parallel import DataParallel, Stages, ZeroOptions, named_parameters
from megatfm.engines.native.fully_sharded import FullySharded
from megatfm.engines.native.graphed import GraphCapture, GraphedModel
from megatfm.engines.native.memory import memory_needed, state_size_ratio
from megatfm.engines.native.replicated import Replicated
from megatfm.engines.passes import ForwardBackward, SequentialForwardBackward
from megatfm.engines.pipelined import PipelineForwardBackward
from megatfm.engines.precision import PRECISIONS, Precision
from megatfm.engines.prepare import init_weights, make_optimizers
from megatfm.engines.recompute import recompute
from megatfm.engines.state import TrainState
from megatfm.engines.ties import TiedParameters
from megatfm.errors import MegatfmError
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.context import disable_compile_of_attention
from megatfm.parallel.forward import replace_forward
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import CONTEXT, PIPELINE, Mesh, sort_axes
from megatfm.parallel.pipeline_cut import Pipeline

DEFAULT = ZeroOptions()
UNSHARDED = ZeroOptions(zero=0)

RECOMPILE_LIMIT = 64
"""Of micro-batches, in training and evaluation, before torch takes it for a mistake that it compiles so often."""


class NativeEngine:
    """Carries out forward, backward and optimizer steps.

    model: on the meta device, its plan laid. layout: what laying the plan returned. pipeline: how the whole model is
    cut into stages, where `model` has only this rank's. graphs: who records passes as graphs, in one process.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        *,
        device: torch.device,
        precision: str,
        seed: int,
        optimizers: Sequence[OptimizerGroup],
        sharing: ZeroOptions = DEFAULT,
        pipeline: Pipeline | None = None,
        recomputed: str = "none",
        compile_blocks: bool = False,
        autotune: bool = False,
        eager_attention: bool = False,
        async_tp: bool = False,
        graphs: GraphCapture | None = None,
    ) -> None:
        self._model, self.layout, self.mesh, self.device = model, layout, mesh, device
        # One data rank has nobody to share with: no gathering, no buffers.
        self.sharing = sharing if mesh.data_ranks > 1 else UNSHARDED
        self.precision, self.pipeline = PRECISIONS[precision], pipeline
        self.loss_scale = LossScale() if precision == "fp16" else None
        recompute(model, transformer_blocks(model), recomputed, compiled=compile_blocks)
        if compile_blocks:
            compile_all(
                transformer_blocks(model),
                autotune=autotune,
                whole=mesh.size(CONTEXT) == 1 and not eager_attention,
                async_tp=async_tp,
            )
        self.data = shard_parameters([model], layout, mesh, self.sharing, PRECISIONS[precision], device)
        self.boxes, self.local = self.data.boxes, self.data.local
        weights = {
            name: ShardedTensor(block, layout[name].shape, self.boxes[name][0])
            for name, block in self.local.items()
        }
        init_weights(model, layout, weights, seed)
        self.data.weights_changed(frozen=True)
        self.optimizers = make_optimizers(optimizers, weights, mesh)
        self.moment_share = state_size_ratio(optimizers, weights)
        self.ties = TiedParameters(pipeline, mesh)
        self.module_state = ModuleState(model, layout, mesh, self.ties)
        self.state = TrainState({**weights, **self.module_state.boxes}, self.optimizers, self.loss_scale)
        self.distinct = GlobalNorm(
            layout, mesh, device, sharded=self.data.sharded, counted=self.ties.is_owner
        )
        self.norms = LayerStatistics(model, layout, mesh, self.distinct, compiled=compile_blocks)
        self.reads = DeferredReads()
        # The losses whose gradients these are, for the host and on the device.
        self.pending_losses: tuple[LossTotals, Tensor] | None = None
        # On a CPU there is nobody to wait for, and gradients that aren't clipped need no pass over them.
        self.skipping_optimizers = (
            [each for each in self.optimizers if each.can_skip] if device.type != "cpu" else []
        )
        self.graphed = graphs is not None
        self.passes: ForwardBackward = (
            GraphedModel(model, graphs) if graphs else SequentialForwardBackward(model)
        )
        self.pipeline_groups: list[ProcessGroup] = []
        if pipeline:
            self.pipeline_groups = [mesh.group(PIPELINE), mesh.new_group_along(PIPELINE)]
            self.passes = PipelineForwardBackward(
                model,
                pipeline,
                *self.pipeline_groups,
                dtype=PRECISIONS[precision].compute_dtype,
                device=device,
            )

    @property
    def model(self) -> nn.Module:
        """The model, whose weights are all those of the last step, however one gets at them."""
        self.data.wait_for_weights()
        return self._model

    @property
    def replicated_axes(self) -> Sequence[str]:
        weights = {placement.data_axes for placement in self.layout.values()}
        state = {placement.data_axes for placement in self.layout.state.values()}
        copied = {
            axis for data in weights for axis in (data.replicate_axes if self.data.sharded else data.all)
        }
        return sort_axes(copied | {axis for data in state for axis in data.all})

    def forward_backward(
        self, microbatches: Sequence[Arrays], objective: LossFunction, *, record_activations: bool = False
    ) -> LossTotals:
        """Accumulate the gradient of the global batch's loss over this rank's micro-batches: once before a step."""
        check_first_pass(self.pending_losses)
        self._model.train()
        self.norms.watch(record_activations)
        batches = [local_batch(batch, self.device, self.layout) for batch in microbatches]
        losses = LossAccumulator(objective, self.mesh, self.device, self.reads)
        losses.count(microbatches)
        weigh = losses.shares(self.loss_scale.value if self.loss_scale else 1.0)
        # Hooks that measure are no part of what was recorded.
        passes = (
            SequentialForwardBackward(self._model) if record_activations and self.graphed else self.passes
        )
        for terms in passes.step(batches, objective, weigh, self.data):
            losses.add(terms)
        self.data.reduce()
        self._all_have_gradients()
        self.ties.all_reduce_gradients(self.gradients())
        all_reduce_partial_gradients(self.gradients(), self.layout, self.mesh)
        if self.loss_scale and self.gradients():
            torch._foreach_mul_(list(self.gradients().values()), 1 / self.loss_scale.value)
        sums = losses.result()
        self.pending_losses = sums, losses.summed
        return sums

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """See `Engine.step`. The host reads norm and losses together, once, while the device is at the steps of those
        optimizers that decide there whether there is one; the others wait for the host to say so. Gradients that
        are not finite lower float16's loss scale, whether or not the step is skipped."""
        gradients = self.gradients()
        true_norm = self.distinct.norm(gradients)
        norm = true_norm * math.nan if skip else true_norm
        if self.skipping_optimizers and self.pending_losses:
            norm = norm + (self.pending_losses[1] * 0).sum()  # NaN if one of them is not finite
        read = self.reads.defer(torch.stack([norm, true_norm]))
        if self.skipping_optimizers:
            self.reads.start_copy()
            clip_gradients(gradients, norm, clip)
            spoiled = (norm - norm).ne(0).float()  # 0 of a finite one, else NaN, which is not 0
            for optimizer in self.skipping_optimizers:
                optimizer.step(gradients, lr, spoiled)
        found, of_gradients = read()
        if self.pending_losses and not math.isfinite(self.pending_losses[0].loss):
            found = math.nan
        if self.loss_scale:
            self.loss_scale.update(math.isfinite(of_gradients))
        if math.isfinite(found):
            if not self.skipping_optimizers:
                clip_gradients(gradients, found, clip)
            for optimizer in self.optimizers:
                if optimizer not in self.skipping_optimizers:
                    optimizer.step(gradients, lr)
            self.module_state.update()
            self.data.weights_changed()
        else:
            for optimizer in self.skipping_optimizers:
                optimizer.not_taken()
        self.zero_grad()
        return found

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: LossFunction) -> LossTotals:
        """The loss over batches, of which every rank must bring equally many."""
        self._model.eval()
        losses = LossAccumulator(objective, self.mesh, self.device)
        with self.state.averaged_weights(self.data.weights_changed):
            for microbatch in batches:
                losses.add(self.passes.evaluate(local_batch(microbatch, self.device, self.layout), objective))
                losses.count_here([microbatch])
        losses.sum_counts()
        return losses.result()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's blocks of all gradients, complete over every axis after `forward_backward`."""
        return self.data.gradients()

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """After `forward_backward`: see LayerStatistics, and what stateful modules tell. A collective."""
        return self.norms.measure(self.local, self.gradients(), self.module_state.statistics())

    def zero_grad(self) -> None:
        """Forget the gradients, and what modules observed."""
        self.data.zero_grad()
        self.module_state.forget()
        self.pending_losses = None

    def weights(self) -> Mapping[str, ShardedTensor]:
        """This rank's blocks, in the stored precision, and the state of modules."""
        return self.state.weights

    def weights_changed(self) -> None:
        """To be called after the weights were set from outside: whoever has copies of them looks again."""
        self.state.refresh()
        self.data.weights_changed(frozen=True)

    def state_dict(self) -> StateDict:
        """See `TrainState`."""
        return self.state.state_dict()

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Room for what a checkpoint holds (name → dtype, global shape): weights in place, fresh optimizer state."""
        return self.state.empty_state_dict(stored)

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over what `empty_state_dict` made and a checkpoint filled (the weights already are in place)."""
        self.state.load_state_dict(state)
        self.data.weights_changed(frozen=True)

    def memory_needed(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """See memory.py."""
        return memory_needed(
            self._model,
            self.state.weights.values(),
            self.precision,
            self.sharing,
            self.mesh,
            self.pipeline,
            moment_share=self.moment_share,
            microbatches=microbatches,
            block_input=block_input,
        )

    def process_groups(self) -> Mapping[str, str]:
        """Groups of the axes, of what reduces or gathers over several, and of ties between pipeline ranks."""
        ties = {str(group.group_name): PIPELINE for group in (*self.pipeline_groups, *self.ties.groups)}
        data = {placement.data_axes.all for placement in self.layout.values()}
        return ties | self.mesh.group_names(self.mesh.shard_axes, self.mesh.data_axes, *sorted(data))

    def _all_have_gradients(self) -> None:
        trained = {name for name, parameter in named_parameters([self._model]) if parameter.requires_grad}
        if missing := sorted(trained - self.gradients().keys()):
            raise MegatfmError(
                f"no loss depends on {', '.join(missing[:3])} ({len(missing)} of the weights here): leave their part "
                "out of [model], or take an objective that trains it; a part that some micro-batches don't reach must "
                "give them a gradient of 0, for example by adding 0 · weight.sum() to its output"
            )


def compile_all(
    found: Iterable[nn.Module], *, autotune: bool, whole: bool = True, async_tp: bool = False
) -> None:
    """Compile blocks, for each shape that they meet: after a warm-up of lengths, torch would else take all dims for
    ones that change, and the rest of the run would go by slower kernels. whole: attention, which may let keys travel,
    too; what says `is_compiled = False`, as experts do, never is. async_tp: see async_tp.py."""
    from torch._dynamo import config

    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if autotune else {}
    if async_tp:
        from megatfm.engines.native.async_tp import compile_options

        options = {"options": compile_options(autotune)}
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    for block in found:
        eager = [part for part in block.modules() if not getattr(part, "is_compiled", True)]
        for part in eager:
            replace_forward(part, torch.compiler.disable(part.forward))
        if not whole:
            disable_compile_of_attention(block)
        block.compile(fullgraph=whole and not eager, dynamic=False, **options)


def shard_parameters(
    stages: Stages,
    layout: ModelLayout,
    mesh: Mesh,
    sharing: ZeroOptions,
    precision: Precision,
    device: torch.device,
) -> DataParallel:
    """Lay the stages' parameters (on the meta device) out over the data axes; they come back in memory, not yet set."""
    if sharing.zero <= 1:
        return Replicated(stages, layout, mesh, sharing=sharing, precision=precision, device=device)
    return FullySharded(stages, layout, mesh, sharing=sharing, precision=precision, device=device)
