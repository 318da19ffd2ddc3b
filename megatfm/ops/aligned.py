"""Tensors that lie in memory as torch's own do: row by row, from a multiple of 64 bytes on.

Kernels (of BLAS, LAPACK and others) may add up in another order where a tensor begins elsewhere, or lies by columns.
What was loaded would then give other bits than what was computed here. So whatever brings tensors into a model, an
optimizer or a batch passes them through here.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LINE_BYTES = 64
"""A processor's cache line and its widest register, at a multiple of which torch's memory begins."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor lies row by row from a multiple of 64 bytes on."""
    return tensor.data_ptr() % LINE_BYTES == 0 and tensor.is_contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where it lies so, else a copy that does."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def align_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each of them aligned. Where a part of a buffer is not, none of its parts stays there, so that it can go."""
    left = {_buffer(tensor) for tensor in tensors.values() if not is_aligned(tensor)}
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) if _buffer(tensor) in left else tensor
        for name, tensor in tensors.items()
    }


def aligned_bytes(size: int, line: int = LINE_BYTES) -> NDArray[np.uint8]:
    """So much memory from a multiple of `line` on, not yet set. NumPy asks the kernel for huge pages, torch doesn't."""
    memory = np.empty(size + line, np.uint8)
    start = -memory.ctypes.data % line
    return memory[start : start + size]


def _buffer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
