"""The precision in which a loaded model computes."""

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def working_dtype(asked: str | torch.dtype, stored: torch.dtype) -> torch.dtype:
    """The dtype of a model's parameters: what is asked for, or for "auto" what they are stored in, up to float32.

    Raises UsageError for what is neither.
    """
    if asked == "auto":
        return torch.float32 if stored == torch.float64 or not stored.is_floating_point else stored
    dtype = DTYPES.get(asked, asked) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise UsageError(f"dtype = {asked!r}: choose one of auto, {', '.join(DTYPES)}")
    return dtype


def take(into: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A stored value as the module computes with it: parameters in `dtype`, the state of modules in its own."""
    return value.to(dtype if isinstance(into, nn.Parameter) else into.dtype)
