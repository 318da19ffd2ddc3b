"""fp8 training: selects the linear layers to run in fp8, and converts them.

These are attention and feed-forward projections whose dims are multiples of 16. The first and last block of a stack,
which are the most sensitive to rounding, stay in bf16, as do embeddings, heads, routers, experts and attention itself.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from megatfm.errors import UsageError
from megatfm.layers.linear import Linear
from megatfm.ops.fp8 import ALIGNMENT, fp8_linear

BLOCK = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<index>\d+)\.")


def find_fp8_linears(model: nn.Module) -> dict[str, Linear]:
    """Return the linear layers to run in fp8, by path. Call it before the model is sharded or split into stages."""
    linears: dict[str, tuple[str, int, Linear]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and (block := BLOCK.match(path)) and ".lora." not in path:
            linears[path] = block["stack"], int(block["index"]), module
    last: dict[str, int] = {}
    for stack, index, _ in linears.values():
        last[stack] = max(index, last.get(stack, 0))
    return {
        path: module
        for path, (stack, index, module) in linears.items()
        if 0 < index < last[stack] and not any(dim % ALIGNMENT for dim in module.weight.shape)
    }


def convert_to_fp8(model: nn.Module, *, rowwise: bool) -> dict[str, Linear]:
    """Convert the model's fp8 layers, and return them by path. Raises UsageError if there are none."""
    linears = find_fp8_linears(model)
    if not linears:
        raise UsageError(
            "train.precision = 'fp8' multiplies in the blocks between a stack's first and last, in matrices whose dims "
            f"are multiples of {ALIGNMENT}, and this model has none: set train.precision = 'bf16'"
        )
    for module in linears.values():
        module.matmul = partial(fp8_linear, rowwise=rowwise)
    return linears


def check_sharded_shapes(linears: Mapping[str, Linear], full_shapes: Mapping[str, Sequence[int]], ranks: int) -> None:
    """Check the shapes of fp8 layers after tensor parallelism. full_shapes: unsharded shapes, by parameter.

    Raises UsageError for shards whose dims are no multiples of 16, and for replicated matrices, whose partial gradients
    would each be rounded.
    """
    for path, matrix in linears.items():
        local_shape, shape = tuple(matrix.weight.shape), tuple(full_shapes[f"{path}.weight"])
        if local_shape == shape:
            raise UsageError(
                f"train.precision = 'fp8': {path} is replicated on parallel.tp = {ranks} ranks, so that its partial "
                "gradients would be rounded: take a parallel.tp that divides its heads, or train.precision = 'bf16'"
            )
        if any(dim % ALIGNMENT for dim in local_shape):
            raise UsageError(
                f"train.precision = 'fp8': parallel.tp = {ranks} leaves {list(local_shape)} of {path} {list(shape)}, "
                f"and fp8 matmuls need multiples of {ALIGNMENT}: take a smaller parallel.tp, other sizes, or "
                "train.precision = 'bf16'"
            )
