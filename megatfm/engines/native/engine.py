"""The native engine: a parallelized model whose weights are sharded over the data axes by ZeRO 0 to 3."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from megatfm.checkpoint import ShardedTensor
from megatfm.config import Config
from megatfm.engines.activation_checkpointing import recompute, recompute_from_outside, recompute_parts
from megatfm.engines.base import BaseEngine, init_weights, make_optimizers
from megatfm.engines.gradients import clip_gradients
from megatfm.engines.interface import (
    MOMENTS,
    PRECISIONS,
    Batch,
    ComparingLoss,
    MemoryNeeds,
    OptimizerGroup,
    ParallelizedModel,
    Precision,
    T,
)
from megatfm.engines.losses import LossAccumulator, LossScale
from megatfm.engines.native.compile import CompileOptions, compile_all, find_eager_modules, make_compile_options
from megatfm.engines.native.cuda_graphs import GraphCapture, GraphedModel, make_graph_capture
from megatfm.engines.native.fully_sharded import FullySharded
from megatfm.engines.native.replicated import Replicated
from megatfm.engines.native.zero import DataParallel, ZeroOptions, compute_state_size_ratio
from megatfm.engines.passes import (
    ForwardBackward,
    GradientSync,
    LossScaler,
    SequentialForwardBackward,
    concatenate_features,
)
from megatfm.engines.pipeline import PipelineForwardBackward, check_split_backward, count_max_block_inputs
from megatfm.engines.state import TiedParameters
from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout, iter_blocks
from megatfm.parallel.mesh import CONTEXT, DENSE_DATA_AXES, PIPELINE, DataAxes, Mesh
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD

DEFAULT_ZERO = ZeroOptions()
UNSHARDED = ZeroOptions(zero=0)


@dataclass(frozen=True)
class NativeOptions:
    """How the native engine runs a model; results are the same.

    zero: sharding over data ranks. recompute_mode: see `activation_checkpointing`. compile: how blocks are compiled;
    None: they aren't. graphs: records passes as CUDA graphs, in one process.
    """

    zero: ZeroOptions = DEFAULT_ZERO
    recompute_mode: str = "none"
    compile: CompileOptions | None = None
    graphs: GraphCapture | None = None

    @classmethod
    def from_config(cls, config: Config, device: torch.device) -> Self:
        """Return the options of a config on a device."""
        return cls(
            ZeroOptions.from_config(config.parallel),
            config.train.recompute,
            make_compile_options(config, device),
            make_graph_capture(config, device),
        )


DEFAULT_OPTIONS = NativeOptions()


class NativeEngine(BaseEngine):
    """Runs forward and backward passes and optimizer steps: see `interface.Engine`.

    precision: a key of `PRECISIONS`. seed: of the initial weights.
    """

    def __init__(
        self,
        parallelized: ParallelizedModel,
        optimizers: Sequence[OptimizerGroup],
        *,
        precision: str,
        seed: int,
        options: NativeOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._model = model = parallelized.model
        self.layout, self.mesh, self.device = parallelized.layout, parallelized.mesh, parallelized.device
        layout, mesh, device, pipeline = self.layout, self.mesh, self.device, parallelized.pipeline
        # A single rank needs no gathering and no buffers.
        self.zero_options = options.zero if mesh.gradient_ranks > 1 else UNSHARDED
        self.precision, self.pipeline = PRECISIONS[precision], pipeline
        self.loss_scale = LossScale() if precision == "fp16" else None
        check_split_backward(pipeline, options.recompute_mode)
        prepare_blocks(model, mesh, options)
        self.data = shard_parameters(model, layout, mesh, self.zero_options, self.precision, device)
        self.local, zero_dims = self.data.local, self.data.zero_dims
        self.regions = {name: layout[name].compute_local_region(mesh, zero_dims.get(name)) for name in self.local}
        weights = {
            name: ShardedTensor(block, layout[name].shape, self.regions[name][0]) for name, block in self.local.items()
        }
        init_weights(model, layout, weights, seed)
        self.data.sync_weights(frozen=True)
        self.optimizers = make_optimizers(optimizers, weights, layout, mesh, zero_dims)
        self.state_size = compute_state_size_ratio(optimizers, weights)
        ties = TiedParameters(pipeline, mesh)
        compiled = options.compile is not None
        self._build_state(model, weights, self.optimizers, ties, sharded=self.data.sharded, compiled=compiled)
        # On a CPU there is no device to wait for, and the host can skip the pass that clips gradients.
        self.skipping_optimizers = (
            [optimizer for optimizer in self.optimizers if optimizer.can_skip] if device.type != "cpu" else []
        )
        self.has_graphs = options.graphs is not None
        self._trained_names = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        model.train()
        self.passes = GraphedModel(model, options.graphs) if options.graphs else SequentialForwardBackward(model)
        if pipeline:
            self.passes = self._build_pipeline(model, pipeline)

    @property
    def model(self) -> nn.Module:
        """The model, once the weights of the last step have arrived in all of its parameters."""
        self.data.wait_for_weights()
        return self._model

    def _get_replicated_data_axes(self, data_axes: DataAxes) -> Sequence[str]:
        return data_axes.replicate_axes if self.data.sharded else data_axes.all

    def _set_training(self, training: bool) -> None:
        if self._model.training != training:  # else a step begins with a walk over all modules
            self._model.train(training)

    def _prepare_passes(
        self, losses: LossAccumulator, record_activations: bool
    ) -> tuple[ForwardBackward, LossScaler, GradientSync]:
        scale_loss = losses.compute_term_weights(self.loss_scale.value if self.loss_scale else 1.0)
        # CUDA graphs were recorded without measuring hooks.
        passes = SequentialForwardBackward(self._model) if record_activations and self.has_graphs else self.passes
        return passes, scale_loss, self.data

    def _compare_samples(self, batches: Iterable[Batch], objective: ComparingLoss) -> Mapping[str, Tensor]:
        if isinstance(self.passes, PipelineForwardBackward):
            features = self.passes.features(batches, objective)
        else:
            features = [objective.features(self.model, batch) for batch in batches]
        return objective.compute_terms(self.model, concatenate_features(features)) if features else {}

    def _finish_passes(self) -> None:
        self.data.reduce()

    def _find_weights_without_gradient(self) -> Collection[str]:
        return self._trained_names - self.gradients().keys()

    def step(self, lr: float, clip: float, *, skip: bool = False) -> float:
        """See `Engine.step`.

        Optimizers with `can_skip` decide on the device whether the step is skipped; meanwhile the host reads norm and
        losses, once. Other optimizers wait for the host. Gradients that are not finite lower float16's loss scale,
        whether or not the step is skipped.
        """
        gradients = self.gradients()
        true_norm = self.global_norm.compute(gradients)
        norm = true_norm * math.nan if skip else true_norm
        if self.skipping_optimizers and self.pending_losses:
            norm = norm + (self.pending_losses[1] * 0).sum()  # NaN if a loss is not finite
        read = self.reads.defer(torch.stack([norm, true_norm]))
        if self.skipping_optimizers:
            self.reads.start_copy()
            clip_gradients(gradients, norm, clip)
            found_inf = (norm - norm).ne(0).float()  # 0 for a finite norm, else NaN ≠ 0
            for optimizer in self.skipping_optimizers:
                optimizer.step(gradients, lr, found_inf)
        host_norm, host_true_norm = read()
        if self.pending_losses and not math.isfinite(self.pending_losses[0].loss):
            host_norm = math.nan
        if self.loss_scale:
            self.loss_scale.update(math.isfinite(host_true_norm))
        if math.isfinite(host_norm):
            if not self.skipping_optimizers:
                clip_gradients(gradients, host_norm, clip)
            for optimizer in self.optimizers:
                if optimizer not in self.skipping_optimizers:
                    optimizer.step(gradients, lr)
            self.module_state.update()
            self.data.sync_weights()
        else:
            for optimizer in self.skipping_optimizers:
                optimizer.restore_counters()
        self.zero_grad()
        return host_norm

    @torch.no_grad()
    def run_model(self, function: Callable[[nn.Module], T]) -> T:
        """See `RunsModel`. Eager: shapes that occur once aren't worth compiling."""
        self._set_training(False)
        with torch.compiler.set_stance("force_eager"), self.state.averaged_weights(self._sync_trained_weights):
            return function(self.model)

    def gradients(self) -> dict[str, Tensor]:
        """See `Engine.gradients`."""
        return self.data.gradients()

    def _drop_gradients(self) -> None:
        self.data.zero_grad()

    def _sync_trained_weights(self) -> None:
        self.data.sync_weights()

    def _sync_all_weights(self) -> None:
        self.data.sync_weights(frozen=True)

    def estimate_memory(self, microbatches: int, block_input: int) -> MemoryNeeds:
        """Return a lower bound of the memory that a step needs on this rank, besides the weights that it holds already.

        | ZeRO | Gradients | Optimizer state | Gathered weights |
        |---|---|---|---|
        | 0 | all | all | – |
        | 1 | all | shard | – |
        | 2 | shard; all if micro-batches accumulate unsharded | shard | all |
        | 3 | as 2 | shard | a block, those prefetched, and weights in no block; all in pipelines that split backward |

        "All" means the weights of this rank's stages, sharded by tensor parallelism. Only the activations that every
        recompute mode keeps are counted: the input of each block, for the micro-batches that a rank holds at a time.

        block_input: bytes of a micro-batch between two blocks.
        """
        total = sum(p.numel() for p in self._model.parameters())
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        local = sum(shard.tensor.nbytes for shard in self.state.weights.values()) * trained // max(total, 1)
        is_unsharded = self.pipeline is not None or (
            microbatches > 1 and self.zero_options.grad_accumulation == "unsharded"
        )
        all_gradients = trained * self.precision.param_dtype.itemsize
        n_blocks = sum(1 for _ in iter_blocks(self._model))
        n_inputs = count_max_block_inputs(self.pipeline, self.mesh.rank(PIPELINE), microbatches, n_blocks)
        return MemoryNeeds(
            gradients=all_gradients if self.zero_options.zero < 2 or is_unsharded else local,
            optimizer_state=int(MOMENTS * local * self.state_size),
            gathered=self._count_gathered_weights() * self.precision.compute_dtype.itemsize,
            block_inputs=n_inputs * block_input,
        )

    def _count_gathered_weights(self) -> int:
        """Return the number of weights that are gathered at a time; 0 where the stored ones are computed with."""
        zero = self.zero_options.zero
        if zero < 2 or (self.mesh.count_shards(DENSE_DATA_AXES) == 1 and not self.precision.is_mixed):
            return 0
        total = sum(p.numel() for p in self._model.parameters())
        if zero == 2 or (self.pipeline is not None and self.pipeline.schedule in SPLITS_BACKWARD):
            return total
        sizes = sorted(sum(p.numel() for p in block.parameters()) for block in iter_blocks(self._model))
        depth = self.zero_options.get_prefetch_depth(self.mesh.device_mesh.device_type)
        return total - sum(sizes) + sum(sizes[-1 - depth :])  # the block that runs, and those prefetched


def prepare_blocks(model: nn.Module, mesh: Mesh, options: NativeOptions) -> None:
    """Let a model's blocks recompute activations and be compiled, as the options say."""
    blocks, mode, compilation = list(iter_blocks(model)), options.recompute_mode, options.compile
    if not compilation:
        recompute(model, blocks, mode)
        return
    fullgraph = mesh.size(CONTEXT) == 1 and not compilation.eager_attention
    in_parts = {
        block: eager for block in blocks if (eager := find_eager_modules(block, fullgraph=fullgraph)) or not fullgraph
    }
    recompute(model, [block for block in blocks if block not in in_parts], mode, compiled=True)
    if mode == "selective":
        for block, eager in in_parts.items():
            recompute_parts(block, eager)
    compile_all(blocks, autotune=compilation.autotune, fullgraph=fullgraph, async_tp=compilation.async_tp)
    if mode == "full":
        for block in in_parts:
            recompute_from_outside(block)


def shard_parameters(
    model: nn.Module,
    layout: ModelLayout,
    mesh: Mesh,
    zero_options: ZeroOptions,
    precision: Precision,
    device: torch.device,
) -> DataParallel:
    """Shard a model's parameters (on the meta device) over the data axes, and allocate them uninitialised.

    Raises UsageError for a parameter without dims, since ZeRO divides one.
    """
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.dim()]:
        raise UsageError(
            f"{scalars[0]} is a scalar parameter, and ZeRO shards a dim of each: give it one, as in "
            "nn.Parameter(torch.ones(1))"
        )
    shard = Replicated if zero_options.zero <= 1 else FullySharded
    return shard(model, layout, mesh, zero_options=zero_options, precision=precision, device=device)
