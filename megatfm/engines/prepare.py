"""What an engine does before its first step: memory for a model on the meta device, initial weights, optimizers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.interface import OptimizerGroup, ShardLocation
from megatfm.engines.optimizers import ElementwiseOptimizer, WholeTensorOptimizer
from megatfm.engines.precision import Precision
from megatfm.layers.initialisation import iter_inits
from megatfm.ops.initial import draw
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import Mesh


def materialize(
    model: nn.Module, precision: Precision, device: torch.device, gradients: torch.dtype | None = None
) -> None:
    """Give meta tensors memory, not yet set: parameters in the computed precision, their gradients in the stored, or
    in that of `gradients`."""
    for parameter in model.parameters():
        real = nn.Parameter(
            torch.empty_like(parameter, dtype=precision.compute_dtype, device=device), parameter.requires_grad
        )
        swap_tensors(parameter, real)  # in place, so that ties stay tied
        if precision.is_mixed:
            parameter.grad_dtype = gradients or precision.param_dtype
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            dtype = precision.param_dtype if buffer.is_floating_point() else buffer.dtype
            vars(module)["_buffers"][key] = torch.empty_like(buffer, dtype=dtype, device=device)


@torch.no_grad()
def init_weights(
    model: nn.Module, layout: ModelLayout, weights: Mapping[str, ShardedTensor], seed: int
) -> None:
    """Set this rank's blocks of the weights, and its buffers, to what they begin with."""
    threads = threads_per_process()
    for name, tensor, initial in iter_inits(model):
        if name in weights:
            parts = weights[name].blocks
        else:
            placement = layout.buffers[name]
            parts = [ShardedTensor(tensor, placement.shape, placement.region[0])]
        for box in parts:
            sizes = tuple(box.tensor.shape)
            box.tensor.copy_(draw(initial, seed, name, box.global_shape, box.offsets, sizes, threads))


def threads_per_process() -> int:
    """This process's share of the cores that it may run on. torchrun gives torch one thread a process whatever there
    is, but says how many processes are beside this one."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    share = len(os.sched_getaffinity(0)) // beside if beside and hasattr(os, "sched_getaffinity") else 0
    return max(torch.get_num_threads(), share)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Blocks take their inputs in the computed precision, as FSDP2 has it: a bias may come from a buffer."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for block in transformer_blocks(model):
        block.register_forward_pre_hook(hook, with_kwargs=True)


def make_optimizers(
    groups: Sequence[OptimizerGroup], weights: Mapping[str, ShardedTensor], mesh: Mesh
) -> list[ElementwiseOptimizer | WholeTensorOptimizer]:
    """Over this rank's blocks, or over whole tensors that those who hold their blocks share out. A collective."""
    made: list[ElementwiseOptimizer | WholeTensorOptimizer] = []
    for group in groups:
        own = {name: weights[name] for name in group.names if name in weights}
        local = {name: box.tensor for name, box in own.items()}
        if group.granularity == "elementwise":
            elementwise = ElementwiseOptimizer(group, local)
            elementwise.set_shard_locations(
                {n: ShardLocation(n, box.global_shape, box.offsets) for n, box in own.items()}
            )
            made.append(elementwise)
            continue
        places = {name: (box.offsets, tuple(box.tensor.shape)) for name, box in own.items()}
        everyone = mesh.gather_objects(places, mesh.shard_axes)
        if not own:  # all of them are of other pipeline stages
            made.append(ElementwiseOptimizer(group, local))
            continue
        boxes = {name: [rank[name] for rank in everyone] for name in own}
        shapes = {name: box.global_shape for name, box in own.items()}
        made.append(WholeTensorOptimizer(group, local, boxes, shapes, mesh.flat_group(mesh.shard_axes)))
    return made
