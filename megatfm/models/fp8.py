"""Which products of a model are made of 8-bit floats.

Those of the blocks' matrices (attention's and feed-forward's), where both dims are multiples of 16; not those of the
first and the last block of a stack, which are the most sensitive to rounding, nor embeddings, heads, routers, experts
and attention itself.
"""

import re
from functools import partial

from torch import nn

from megatfm.errors import UsageError
from megatfm.layers.linear import Linear
from megatfm.ops.fp8 import MULTIPLE, fp8_linear

BLOCK = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<number>\d+)\.")


def products_in_fp8(model: nn.Module) -> dict[str, Linear]:
    """Path → matrix of those that are multiplied so, of a model that is not yet cut into shards or stages."""
    found: dict[str, tuple[str, int, Linear]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and (block := BLOCK.match(path)):
            found[path] = block["stack"], int(block["number"]), module
    last: dict[str, int] = {}
    for stack, number, _ in found.values():
        last[stack] = max(number, last.get(stack, 0))
    return {
        path: module
        for path, (stack, number, module) in found.items()
        if 0 < number < last[stack] and not any(dim % MULTIPLE for dim in module.weight.shape)
    }


def multiply_in_fp8(model: nn.Module, *, rowwise: bool) -> None:
    """Have these products made so. Raises UsageError where there are none."""
    chosen = products_in_fp8(model)
    if not chosen:
        raise UsageError(
            "train.precision = 'fp8' multiplies in the blocks between a stack's first and last, in matrices whose dims "
            f"are multiples of {MULTIPLE}, and this model has none: set train.precision = 'bf16'"
        )
    for module in chosen.values():
        module.product = partial(fp8_linear, rowwise=rowwise)
