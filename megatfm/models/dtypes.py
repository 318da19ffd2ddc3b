"""Dtypes of a model: those of loaded parameters, and the linear layers that run in fp8.

In fp8 run attention and feed-forward projections whose dims are multiples of 16. The first and last block of a stack,
which are the most sensitive to rounding, stay in bf16, as do embeddings, heads, routers, experts and attention itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.layers.linear import Linear
from megatfm.ops.fp8 import ALIGNMENT, fp8_linear

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def choose_dtype(requested: str | torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the dtype for a loaded model's parameters: the requested one; "auto": the stored one, at most float32.

    Raises UsageError for an unknown dtype.
    """
    if requested == "auto":
        return torch.float32 if stored == torch.float64 or not stored.is_floating_point else stored
    dtype = DTYPES.get(requested, requested) if isinstance(requested, str) else requested
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise UsageError(f"dtype = {requested!r}: choose one of auto, {', '.join(DTYPES)}")
    return dtype


def find_main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of most elements, float32 without any: a model in bfloat16 may have a few biases in float32."""
    sizes = Counter[torch.dtype]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def convert_loaded(target: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a loaded tensor: parameters to `dtype`, buffers to the target's dtype."""
    return value.to(dtype if isinstance(target, nn.Parameter) else target.dtype)


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
