"""The native engine: a model whose tensor-parallel plan has been laid, its weights shared over the data axes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatfm.checkpoint import Box as StoredBox
from megatfm.engines.data_parallel import DataParallel, Sharing, Stages
from megatfm.engines.fully_sharded import FullySharded
from megatfm.engines.interface import Arrays, Objective, OptimizerGroup, Sums
from megatfm.engines.loss_scale import LossScale
from megatfm.engines.norms import LayerNorms
from megatfm.engines.optimizers import ElementwiseOptimizer, WholeTensorOptimizer
from megatfm.engines.passes import Passes, WholeModel
from megatfm.engines.pipelined import StagePasses
from megatfm.engines.precision import PRECISIONS, Precision
from megatfm.engines.recompute import recompute
from megatfm.engines.replicated import Replicated
from megatfm.engines.ties import Ties
from megatfm.errors import MegatfmError
from megatfm.ops.aligned import aligned
from megatfm.ops.initial import draw, initials
from megatfm.parallel.blocks import blocks
from megatfm.parallel.layout import Layout
from megatfm.parallel.mesh import Mesh
from megatfm.parallel.pipeline_cut import Pipeline

SHARDED = Sharing()
DATA = ("dp_shard", "dp_replicate")


class NativeEngine:
    """Carries out forward, backward and optimizer steps.

    model: on the meta device, its plan laid. layout: what laying the plan returned. pipeline: how the whole model is
    cut into stages, where `model` has only this rank's.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        mesh: Mesh,
        *,
        device: torch.device,
        precision: str,
        seed: int,
        optimizers: Sequence[OptimizerGroup],
        sharing: Sharing = SHARDED,
        pipeline: Pipeline | None = None,
        recomputed: str = "none",
        compile_blocks: bool = False,
    ) -> None:
        self.model, self.layout, self.mesh, self.device = model, layout, mesh, device
        self.precision, self.dtype = PRECISIONS[precision], PRECISIONS[precision].stored
        self.loss_scale = LossScale() if precision == "fp16" else None
        recompute(model, blocks(model), recomputed, compiled=compile_blocks)
        for block in blocks(model) if compile_blocks else ():
            block.compile(fullgraph=True)
        self.data = share([model], layout, mesh, sharing, PRECISIONS[precision], device)
        self.boxes, self.local = self.data.boxes, self.data.local
        self._initialise(seed)
        self.optimizers = [self._optimizer(group) for group in optimizers]
        self.ties = Ties(pipeline, mesh)
        self.norms = LayerNorms(model, layout, mesh, compiled=compile_blocks)
        self.passes: Passes = WholeModel(model)
        if pipeline:
            self.passes = StagePasses(
                model, pipeline, mesh.group("pp"), dtype=PRECISIONS[precision].computed, device=device
            )

    def forward_backward(self, microbatches: Sequence[Arrays], objective: Objective) -> Sums:
        """Accumulate the gradient of the global batch's loss over this rank's micro-batches."""
        self.model.train()
        batches = [self._to_device(batch) for batch in microbatches]
        counts = self._sum_counts(batches, objective)
        sums = {term: torch.zeros((), dtype=torch.float64, device=self.device) for term in counts}

        def weigh(terms: Mapping[str, Tensor]) -> Tensor:
            weighted = [objective.weights[name] / max(counts[name], 1) * term for name, term in terms.items()]
            return torch.stack(weighted).sum() * (self.loss_scale.value if self.loss_scale else 1.0)

        for terms in self.passes.step(batches, objective, weigh, self.data):
            for term, value in terms.items():
                sums[term] += value
        self.data.reduce()
        self._all_have_gradients()
        self.ties.sum(self.gradients())
        self._sum_partial_gradients()
        if self.loss_scale:
            torch._foreach_mul_(list(self.gradients().values()), 1 / self.loss_scale.value)
        return Sums(self._reduce(sums, (*DATA, "pp")), counts, objective.weights)

    def step(self, lr: float, clip: float) -> float:
        """Clip by the global gradient norm (0: don't) and take an optimizer step. Returns the norm before clipping.

        A norm that is not finite leaves weights and state as they are (and lowers float16's loss scale); it is for the
        caller to act on it.
        """
        gradients = self.gradients()
        norm = self._global_norm(gradients)
        if self.loss_scale:
            self.loss_scale.update(bool(torch.isfinite(norm)))
        if torch.isfinite(norm):
            if clip and norm > clip:
                torch._foreach_mul_(list(gradients.values()), float(clip / (norm + 1e-6)))
            for optimizer in self.optimizers:
                optimizer.step(gradients, lr)
            self.data.weights_changed()
        self.zero_grad()
        return float(norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: Objective) -> Sums:
        """The loss over batches, of which every rank must bring equally many."""
        self.model.eval()
        sums = {term: torch.zeros((), dtype=torch.float64, device=self.device) for term in objective.weights}
        counts = dict.fromkeys(objective.weights, 0)
        with self._averaged_weights():
            for microbatch in batches:
                batch = self._to_device(microbatch)
                for term, value in self.passes.evaluate(batch, objective).items():
                    sums[term] += value
                for term, count in self._sum_counts([batch], objective).items():
                    counts[term] += count
        return Sums(self._reduce(sums, (*DATA, "pp")), counts, objective.weights)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's blocks of all gradients, complete over every axis after `forward_backward`."""
        return self.data.gradients()

    def layer_norms(self) -> dict[str, dict[str, float]]:
        """After `forward_backward`: see LayerNorms, whose `watch` must come before. A collective."""
        return self.norms.measure(self.local, self.gradients(), self.ties.counts_here)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.data.zero_grad()

    def state_dict(self) -> dict[str, StoredBox | Tensor]:
        """Weights as model.NAME and optimizer state as optimizer.NAME.KEY: blocks of global tensors, not copied."""
        weights = {**self.local, **self._averaged()}
        state: dict[str, StoredBox | Tensor] = {
            f"model.{name}": self.stored(name, t) for name, t in weights.items()
        }
        for optimizer in self.optimizers:
            for name, values in optimizer.state().items():
                for key, value in values.items():
                    state[f"optimizer.{name}.{key}"] = self._stored_state(optimizer, name, value)
        return {**state, **(self.loss_scale.state() if self.loss_scale else {})}

    def empty_state_dict(
        self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> dict[str, StoredBox | Tensor]:
        """Room for what a checkpoint holds (name → dtype, global shape): weights in place, fresh optimizer state."""
        state: dict[str, StoredBox | Tensor] = {
            f"model.{name}": self.stored(name, t) for name, t in self.local.items()
        }
        for optimizer in self.optimizers:
            for name, block in optimizer.blocks().items():
                prefix = f"optimizer.{name}."
                for full_name, (dtype, shape) in stored.items():
                    if full_name.startswith(prefix):
                        # On the device scalars too: a fused optimizer's step count lies beside the weights.
                        held = shape if isinstance(optimizer, WholeTensorOptimizer) else block.shape
                        value = torch.zeros(held if shape else (), dtype=dtype, device=self.device)
                        state[full_name] = self._stored_state(optimizer, name, value)
        scale = self.loss_scale.state() if self.loss_scale else {}
        return {**state, **{name: value for name, value in scale.items() if name in stored}}

    def load_state_dict(self, state: Mapping[str, StoredBox | Tensor]) -> None:
        """Take over what `empty_state_dict` made and a checkpoint filled (the weights already are in place)."""
        for optimizer in self.optimizers:
            values: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.blocks()}
            for full_name, value in state.items():
                kind, _, rest = full_name.partition(".")
                name, _, key = rest.rpartition(".")
                if kind == "optimizer" and name in values:
                    values[name][key] = value.tensor if isinstance(value, StoredBox) else value
            optimizer.load(values)
        if self.loss_scale:
            self.loss_scale.load(state)
        self.data.weights_changed()

    def weights_changed(self) -> None:
        """To be called after the weights were set from outside: whoever has copies of them looks again."""
        for optimizer in self.optimizers:
            optimizer.refresh()
        self.data.weights_changed()

    def _averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and save that are not the ones that are trained."""
        return {name: value for optimizer in self.optimizers for name, value in optimizer.averaged().items()}

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Put them in place for a while. The trained ones come back from a copy, so to the last bit."""
        averaged = self._averaged()
        trained = {name: self.local[name].clone() for name in averaged}
        self._set_weights(averaged)
        try:
            yield
        finally:
            self._set_weights(trained)

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self.local[name].copy_(value)
        if weights:
            self.data.weights_changed()

    def stored(self, name: str, block: Tensor) -> StoredBox:
        """A block shaped like the parameter `name`, as the checkpoint sees it."""
        return StoredBox(block, self.layout[name].shape, self.boxes[name][0])

    def _stored_state(
        self, optimizer: "ElementwiseOptimizer | WholeTensorOptimizer", name: str, value: Tensor
    ) -> StoredBox | Tensor:
        if value.dim() == 0 or isinstance(optimizer, WholeTensorOptimizer):
            return value
        return self.stored(name, value)

    def _optimizer(self, group: OptimizerGroup) -> "ElementwiseOptimizer | WholeTensorOptimizer":
        local = {name: self.local[name] for name in group.names if name in self.local}
        if group.needs == "elementwise":
            return ElementwiseOptimizer(group, local)
        boxes = self.mesh.gather_objects({name: self.boxes[name] for name in local}, ("dp_shard", "tp"))
        if not local:  # all of them are of other pipeline stages
            return ElementwiseOptimizer(group, local)
        shapes = {name: self.layout[name].shape for name in local}
        by_name = {name: [rank[name] for rank in boxes] for name in local}
        return WholeTensorOptimizer(group, local, by_name, shapes, self.mesh.flat_group(("dp_shard", "tp")))

    def _initialise(self, seed: int) -> None:
        """Draw this rank's blocks of parameters and buffers."""
        for name, tensor, initial in initials(self.model):
            if name in self.boxes:
                offsets, sizes = self.boxes[name]
                self.local[name].copy_(draw(initial, seed, name, self.layout[name].shape, offsets, sizes))
            else:
                placement = self.layout.buffers[name]
                tensor.copy_(draw(initial, seed, name, placement.shape, *placement.box))
        self.data.weights_changed()

    def _to_device(self, batch: Arrays) -> dict[str, Tensor]:
        return {
            field: aligned(torch.as_tensor(values).to(self.device, non_blocking=True))
            for field, values in batch.items()
        }

    def _sum_counts(self, batches: Sequence[Mapping[str, Tensor]], objective: Objective) -> dict[str, int]:
        totals = dict.fromkeys(objective.weights, 0)
        for batch in batches:
            for term, count in objective.counts(batch).items():
                totals[term] += int(count)
        return {term: int(value) for term, value in self._reduce(totals).items()}

    def _reduce(self, values: Mapping[str, Tensor | float], axes: Sequence[str] = DATA) -> dict[str, float]:
        """Sum scalars over axes, in float64 (exact for counts below 2⁵³)."""
        flat = torch.tensor(
            [float(value) for value in values.values()], dtype=torch.float64, device=self.device
        )
        self.mesh.sum(flat, axes)
        return dict(zip(values, flat.tolist(), strict=True))

    def _all_have_gradients(self) -> None:
        if missing := sorted(self.local.keys() - self.gradients().keys()):
            raise MegatfmError(
                f"no loss depends on {', '.join(missing[:3])} ({len(missing)} of the weights here): leave their part "
                "out of [model], or take an objective that trains it"
            )

    def _sum_partial_gradients(self) -> None:
        partial = [g for name, g in self.gradients().items() if self.layout[name].partial_gradient]
        if partial:
            flat = torch.cat([gradient.reshape(-1) for gradient in partial])
            self.mesh.sum(flat, ("tp",))
            for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _global_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """√Σ g² over all elements of the model, each counted once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            if self.ties.counts_here(name):
                squares[int(self.layout[name].dim is None)] += gradient.double().square().sum()
        self.mesh.sum(squares, (*self.data.cut_axes, "pp"))
        cut, whole = squares[:1], squares[1:]
        self.mesh.sum(cut, ("tp",))
        return (cut + whole).sqrt()[0]


def share(
    stages: Stages, layout: Layout, mesh: Mesh, sharing: Sharing, precision: Precision, device: torch.device
) -> DataParallel:
    """Lay the stages' parameters (on the meta device) out over the data axes; they come back in memory, not yet set."""
    if sharing.zero <= 1:
        return Replicated(stages, layout, mesh, zero=sharing.zero, precision=precision, device=device)
    return FullySharded(stages, layout, mesh, sharing=sharing, precision=precision, device=device)
