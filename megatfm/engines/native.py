"""The native engine: FSDP2 over the data axes, on a model whose tensor-parallel plan has been laid."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatfm.checkpoint import Box as StoredBox
from megatfm.engines.interface import Arrays, Objective, OptimizerGroup, Sums
from megatfm.engines.optimizers import ElementwiseOptimizer, WholeTensorOptimizer
from megatfm.ops.initial import draw, initials
from megatfm.parallel.layout import Box, Layout
from megatfm.parallel.mesh import Mesh

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""Of the stored weights; under bf16 the arithmetic is in bfloat16, and gradients are reduced in float32."""


class NativeEngine:
    """Carries out forward, backward and optimizer steps.

    model: on the meta device, its plan laid. layout: what laying the plan returned.
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
        compile_blocks: bool = False,
    ) -> None:
        self.model, self.layout, self.mesh, self.device = model, layout, mesh, device
        self.dtype = DTYPES[precision]
        self.sharded = _shard(model.to(self.dtype), mesh, precision, compile_blocks)
        model.to_empty(device=device)
        self.boxes = {name: self._box(name, p) for name, p in model.named_parameters()}
        self.local = {name: _local(p) for name, p in model.named_parameters()}
        self._initialise(seed)
        self.optimizers = [self._optimizer(group) for group in optimizers]

    def forward_backward(self, microbatches: Sequence[Arrays], objective: Objective) -> Sums:
        """Accumulate the gradient of the global batch's loss over this rank's micro-batches."""
        self.model.train()
        batches = [self._to_device(batch) for batch in microbatches]
        counts = self._sum_counts(batches, objective)
        sums = {term: torch.zeros((), dtype=torch.float64, device=self.device) for term in counts}
        for batch in batches:
            self.sharded.set_requires_gradient_sync(batch is batches[-1])
            terms = objective(self.model, batch)
            weighted = [objective.weights[name] / max(counts[name], 1) * term for name, term in terms.items()]
            torch.stack(weighted).sum().backward()
            for term, value in terms.items():
                sums[term] += value.detach()
        self._sum_partial_gradients()
        return Sums(self._reduce(sums), counts, objective.weights)

    def step(self, lr: float, clip: float) -> float:
        """Clip by the global gradient norm (0: don't) and take an optimizer step. Returns the norm before clipping.

        A norm that is not finite leaves weights and state as they are; it is for the caller to act on it.
        """
        gradients = self.gradients()
        norm = self._global_norm(gradients)
        if torch.isfinite(norm):
            if clip and norm > clip:
                torch._foreach_mul_(list(gradients.values()), float(clip / (norm + 1e-6)))
            for optimizer in self.optimizers:
                optimizer.step(gradients, lr)
        self.model.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays], objective: Objective) -> Sums:
        """The loss over batches, of which every rank must bring equally many."""
        self.model.eval()
        sums: dict[str, Tensor] = {}
        counts = dict.fromkeys(objective.weights, 0)
        with self._averaged_weights():
            for microbatch in batches:
                batch = self._to_device(microbatch)
                for term, value in objective(self.model, batch).items():
                    sums[term] = sums.get(term, 0) + value.double()
                for term, count in self._sum_counts([batch], objective).items():
                    counts[term] += count
        return Sums(self._reduce(sums), counts, objective.weights)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's blocks of all gradients, complete over every axis after `forward_backward`."""
        parameters = self.model.named_parameters()
        return {name: _local(p.grad) for name, p in parameters if p.grad is not None}

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
        return state

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
        return state

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

    def weights_changed(self) -> None:
        """To be called after the weights were set from outside: optimizers with copies of them look again."""
        for optimizer in self.optimizers:
            optimizer.refresh()

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
        for module in self.model.modules() if weights else ():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root keeps what it gathered, which would be the weights before these

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
        local = {name: self.local[name] for name in group.names}
        if group.needs == "elementwise":
            return ElementwiseOptimizer(group, local)
        boxes = self.mesh.gather_objects({name: self.boxes[name] for name in group.names}, ("dp_shard", "tp"))
        shapes = {name: self.layout[name].shape for name in group.names}
        by_name = {name: [rank[name] for rank in boxes] for name in group.names}
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

    def _box(self, name: str, parameter: nn.Parameter) -> Box:
        if not isinstance(parameter, DTensor):
            return self.layout[name].box
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return self.layout[name].inside(tuple(offsets), tuple(sizes))

    def _to_device(self, batch: Arrays) -> dict[str, Tensor]:
        return {
            field: torch.as_tensor(values).to(self.device, non_blocking=True)
            for field, values in batch.items()
        }

    def _sum_counts(self, batches: Sequence[Mapping[str, Tensor]], objective: Objective) -> dict[str, int]:
        totals = dict.fromkeys(objective.weights, 0)
        for batch in batches:
            for term, count in objective.counts(batch).items():
                totals[term] += int(count)
        return {term: int(value) for term, value in self._reduce(totals).items()}

    def _reduce(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Sum scalars over the data axes, in float64 (exact for counts below 2⁵³)."""
        flat = torch.tensor(
            [float(value) for value in values.values()], dtype=torch.float64, device=self.device
        )
        self.mesh.sum(flat, ("dp_shard", "dp_replicate"))
        return dict(zip(values, flat.tolist(), strict=True))

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
            squares[int(self.layout[name].dim is None)] += gradient.double().square().sum()
        self.mesh.sum(squares, ("dp_shard",))
        cut, whole = squares[:1], squares[1:]
        self.mesh.sum(cut, ("tp",))
        return (cut + whole).sqrt()[0]


def _shard(model: nn.Module, mesh: Mesh, precision: str, compile_blocks: bool) -> FSDPModule:
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    for layer in blocks(model):
        if compile_blocks:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh.fsdp_mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh.fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, so gradients are to be summed, not averaged;
            # gloo has no pre-multiplied sum, which FSDP2 would otherwise choose.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    assert isinstance(model, FSDPModule)
    return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of all stacks, which are compiled, gathered and recomputed one at a time."""
    for path, module in model.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] == "layers":
            yield module


def _local(tensor: Tensor) -> Tensor:
    """The block of a DTensor that lies here, sharing its storage."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
