"""Plain data parallelism: torch's DistributedDataParallel over whole copies of a model or its parts."""

import math
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.base import init_weights, make_optimizers, materialize
from megatfm.engines.gradients import GlobalNorm, LayerStatistics, all_reduce_partial_gradients, clip_gradients
from megatfm.engines.interface import MOMENTS, PRECISIONS, MemoryNeeds
from megatfm.engines.losses import LossAccumulator, to_device
from megatfm.engines.registry import ENGINES
from megatfm.engines.state import ModuleState, TrainState
from megatfm.errors import UsageError
from megatfm.parallel.layout import iter_blocks


@ENGINES.register("ddp", features=())
class DdpEngine:
    def __init__(self, setup):
        parallel, train = setup.config.parallel, setup.config.train
        if parallel.zero or setup.precision not in ("fp32", "fp64"):
            raise UsageError(
                f"parallel.engine = 'ddp' with parallel.zero = {parallel.zero} and train.precision = "
                f"{setup.precision!r}: set zero = 0 and 'fp32', or engine = 'native'"
            )
        self.layout, self.mesh, self.device = setup.layout, setup.mesh, setup.device
        self.precision, self.replicated_axes = PRECISIONS[setup.precision], setup.mesh.batch_axes
        self.model = setup.model
        materialize(self.model, self.precision, self.device)
        self.parameters = dict(self.model.named_parameters())
        self.blocks = {
            name: ShardedTensor(p.detach(), self.layout[name].shape, self.layout[name].region[0])
            for name, p in self.parameters.items()
        }
        init_weights(self.model, self.layout, self.blocks, train.seed)
        self.global_norm = GlobalNorm(self.layout, self.mesh, self.device, sharded=False)
        self.layer_stats = LayerStatistics(self.model, self.layout, self.mesh, self.global_norm, compiled=False)
        self.modules = ModuleState(self.model, self.layout, self.mesh)
        optimizers = make_optimizers(setup.optimizers, self.blocks, self.layout, self.mesh)
        self.state = TrainState({**self.blocks, **self.modules.buffers}, optimizers)
        self.state_dict, self.load_state_dict = self.state.state_dict, self.state.load_state_dict
        self.empty_state_dict, self.sync_weights = self.state.empty_state_dict, self.state.refresh
        data = self.mesh.flat_group(self.mesh.batch_axes)
        self.ddp = DistributedDataParallel(self.model, process_group=data, init_sync=False)

    def forward_backward(self, microbatches, objective, *, record_activations=False):
        self.ddp.train()
        self.layer_stats.watch(record_activations)
        batches = [to_device(batch, self.device) for batch in microbatches]
        losses = LossAccumulator(objective, self.mesh, self.device)
        losses.count(microbatches)
        scale_loss = losses.compute_term_weights()
        for batch in batches:
            with nullcontext() if batch is batches[-1] else self.ddp.no_sync():
                terms = objective(self.ddp, batch)
                # DDP takes the mean over ranks; a global loss is a sum.
                (scale_loss(terms) * self.mesh.data_ranks).backward()
            losses.add({name: term.detach() for name, term in terms.items()})
        all_reduce_partial_gradients(self.gradients(), self.layout, self.mesh)
        self.stats = losses.compute_totals()
        return self.stats

    def step(self, lr, clip, *, skip=False):
        gradients = self.gradients()
        norm = float(self.global_norm.compute(gradients, found_inf=skip or not math.isfinite(self.stats.loss)))
        if math.isfinite(norm):
            clip_gradients(gradients, norm, clip)
            for optimizer in self.state.optimizers:
                optimizer.step(gradients, lr)
            self.modules.update()
        self.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, batches, objective):
        self.model.eval()
        losses = LossAccumulator(objective, self.mesh, self.device)
        with self.state.averaged_weights(lambda: None):
            for batch in batches:
                losses.add(objective(self.model, to_device(batch, self.device)))
                losses.count([batch])
        return losses.compute_totals()

    def gradients(self):
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self):
        self.model.zero_grad()
        self.modules.reset()

    def layer_statistics(self):
        return self.layer_stats.measure({name: block.tensor for name, block in self.blocks.items()}, self.gradients())

    def weights(self):
        return self.state.weights

    def estimate_memory(self, microbatches, block_input):
        """Gradients lie in their tensors and in DDP's buckets."""
        weights = sum(block.tensor.nbytes for block in self.blocks.values())
        return MemoryNeeds(2 * weights, MOMENTS * weights, 0, len(list(iter_blocks(self.model))) * block_input)

    def process_groups(self):
        return self.mesh.group_names(self.mesh.batch_axes, self.mesh.shard_axes)
