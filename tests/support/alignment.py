"""Planting tensors where torch never puts them, and finding those that reach a kernel."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OFF = 8
"""Bytes behind a multiple of 64: half a register of SSE, with which BLAS begins where memory does."""


def misaligned(tensor: Tensor) -> Tensor:
    """A copy, with the same strides, that begins 8 bytes behind a multiple of 64."""
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(spread * tensor.itemsize + 2 * 64, dtype=torch.uint8)
    # A storage of its own, as that of a file's map or of NumPy is, not a part of one of torch's.
    array = memory.numpy()[-memory.data_ptr() % 64 + OFF :][: spread * tensor.itemsize]
    flat = torch.from_numpy(array).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())


def lies_wrong(tensor: Tensor) -> bool:
    """Whether a tensor begins off a multiple of 64 bytes or has gaps."""
    return tensor.data_ptr() % 64 != 0 or not tensor.is_contiguous()


class Kernels(TorchDispatchMode):
    """While entered, notes the operators of torch that take a tensor out of memory that is not torch's own.

    Views are let through: what is cut out of aligned memory at the same place gives the same bits each time.
    """

    PASSING = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.to", "aten.detach", "aten.alias", "c10d.")
    """They move bytes and reckon nothing, or make views."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not (func.is_view or str(func).startswith(self.PASSING)):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
                    self.seen += 1
                    if tensor.untyped_storage().data_ptr() % 64:
                        self.wrong.add(f"{func} {list(tensor.shape)}")
        return func(*args, **(kwargs or {}))


@contextmanager
def only_torchs_memory() -> Iterator[Kernels]:
    """Every kernel that runs inside reckons with memory of torch's own."""
    with Kernels() as kernels:
        yield kernels
    assert kernels.seen
    assert not kernels.wrong, sorted(kernels.wrong)
