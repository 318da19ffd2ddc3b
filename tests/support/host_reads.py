"""Calls that make the host wait for the device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKING_OPERATORS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.is_nonzero",
    "aten.equal",
)
"""Operators whose result the host needs before it can go on: a number, or a shape that depends on values."""
BLOCKING_METHODS = ("tolist", "cpu", "numpy")
"""Methods of tensors that bring all values to the host and show up as no operator."""


class HostWaits(TorchDispatchMode):
    """Notes the operators that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        masks = args[1] if str(func).startswith(("aten.index.", "aten.index_put")) else ()
        if name in BLOCKING_OPERATORS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
