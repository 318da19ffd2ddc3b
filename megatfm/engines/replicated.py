"""ZeRO stages 0 and 1: every data rank computes with whole weights; gradients are reduced once a step.

Nothing happens within forward and backward passes, so any pipeline schedule will do. The price: the reduction waits
for the last backward pass instead of running beside it, as in stages 2 and 3.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from megatfm.engines.buckets import all_gather, deal, reduce_scatter
from megatfm.engines.data_parallel import Stages, blocks, named_parameters
from megatfm.engines.precision import Precision
from megatfm.parallel.layout import Box, Layout
from megatfm.parallel.mesh import Mesh

REPLICAS = ("dp_replicate", "dp_shard")


class Replicated:
    """Stage 0 keeps everything on every rank. Stage 1 scatters the summed gradients over dp_shard; a rank moves the
    rows that it is given, in the stored precision, and the weights are gathered after each change."""

    def __init__(
        self,
        stages: Stages,
        layout: Layout,
        mesh: Mesh,
        *,
        zero: int,
        precision: Precision,
        device: torch.device,
    ) -> None:
        for stage in stages:
            _materialise(stage, precision, device)
            if precision.is_mixed:
                _cast_inputs(stage, precision.computed)
        self._mesh, self._precision = mesh, precision
        self._parameters = dict(named_parameters(stages))
        self._cut = zero == 1 and mesh.size("dp_shard") > 1
        self._rank, ranks = (mesh.rank("dp_shard"), mesh.size("dp_shard")) if self._cut else (0, 1)
        self._buckets = list(deal({name: p.shape for name, p in self._parameters.items()}, ranks))
        self._gradients: dict[str, Tensor] = {}
        self.cut_axes: tuple[str, ...] = ("dp_shard",) if zero == 1 else ()
        self.local: dict[str, Tensor] = {}
        self.boxes: dict[str, Box] = {}
        for bucket in self._buckets:
            for name, shape in bucket.shapes.items():
                first, count = bucket.rows(name, self._rank)
                rows = self._parameters[name].detach()[first : first + count]
                # Without a precision of its own, what the optimizer moves are the model's weights themselves.
                self.local[name] = rows.to(precision.stored)
                offsets = (first, *[0] * (len(shape) - 1))
                self.boxes[name] = layout[name].inside(offsets, (count, *shape[1:]))

    def begin(self, last: bool) -> None:
        """Nothing: gradients add up in `.grad`."""

    def begin_pipeline(self, keep_whole: bool) -> None:
        """Nothing, likewise."""

    def reduce(self) -> None:
        if self._mesh.data_ranks == 1:  # nothing to sum, so nothing to pack
            self._gradients = {
                name: torch.zeros_like(self.local[name]) if p.grad is None else p.grad
                for name, p in self._parameters.items()
            }
            return
        for bucket in self._buckets:
            parameters = {name: self._parameters[name] for name in bucket.shapes}
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            buffer = bucket.pack(gradients, next(iter(self.local.values())))
            del gradients
            for parameter in parameters.values():  # at once, so that no two whole copies are held
                parameter.grad = None
            if self._cut:
                row = reduce_scatter(buffer, self._mesh.group("dp_shard"))
                self._mesh.sum(row, ("dp_replicate",))
            else:
                row = buffer[0]
                if self._mesh.data_ranks > 1:
                    dist.all_reduce(row, group=self._mesh.flat_group(REPLICAS))
            self._gradients |= bucket.unpack_own(row, self._rank)

    def gradients(self) -> dict[str, Tensor]:
        return dict(self._gradients)

    def zero_grad(self) -> None:
        self._gradients = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def weights_changed(self) -> None:
        if self._cut:
            for bucket in self._buckets:
                row = bucket.pack_own(self.local, next(iter(self._parameters.values())))
                buffer = all_gather(row, bucket.ranks, self._mesh.group("dp_shard"))
                bucket.unpack(buffer, self._parameters)
        elif self._precision.is_mixed:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.local[name])


def _materialise(stage: nn.Module, precision: Precision, device: torch.device) -> None:
    """Give meta tensors memory, not yet set: parameters in the computed precision, their gradients in the stored."""
    for parameter in stage.parameters():
        real = torch.empty_like(parameter, dtype=precision.computed, device=device)
        swap_tensors(parameter, nn.Parameter(real))  # in place, so that ties stay tied
        if precision.is_mixed:
            parameter.grad_dtype = precision.stored
    for module in stage.modules():
        for key, buffer in module.named_buffers(recurse=False):
            dtype = precision.stored if buffer.is_floating_point() else buffer.dtype
            vars(module)["_buffers"][key] = torch.empty_like(buffer, dtype=dtype, device=device)


def _cast_inputs(stage: nn.Module, dtype: torch.dtype) -> None:
    """Blocks take their inputs in the computed precision, as FSDP2 has it: a bias may come from a buffer."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for block in blocks(stage):
        block.register_forward_pre_hook(hook, with_kwargs=True)
