"""Placement of tensors: aligned in memory as torch's own, and copied to a device without a stall of the host.

Aligned tensors lie row by row, from a multiple of 64 bytes on. Kernels (of BLAS, LAPACK and others) may add up in
another order where a tensor begins elsewhere, or lies by columns: what was loaded would then give other bits than what
was computed here. So all code that brings tensors into a model, an optimizer or a batch passes them through here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.ops.torch_private import is_fake, weak_dictionary

LINE_BYTES = 64
"""A processor's cache line and its widest register, at a multiple of which torch's memory begins."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor lies row by row from a multiple of 64 bytes on."""
    if is_fake(tensor):  # torch's own memory begins at such a multiple
        start = tensor.storage_offset() * tensor.element_size()
    else:
        start = tensor.data_ptr()
    return start % LINE_BYTES == 0 and tensor.is_contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where it lies so, else a copy that does."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def align_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each of them aligned. Where a part of a buffer is not, none of its parts stays there, so that it can go."""
    unaligned = {_buffer(tensor) for tensor in tensors.values() if not is_aligned(tensor)}
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) if _buffer(tensor) in unaligned else tensor
        for name, tensor in tensors.items()
    }


def aligned_bytes(size: int, line: int = LINE_BYTES) -> NDArray[np.uint8]:
    """So much memory from a multiple of `line` on, not yet set. NumPy asks the kernel for huge pages, torch doesn't."""
    memory = np.empty(size + line, np.uint8)
    start = -memory.ctypes.data % line
    return memory[start : start + size]


def _buffer(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()


_HOST_COPIES: Any = weak_dictionary()
"""Host copies of tensors on a device, by tensor, with the tensor's version when it was copied."""


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. Copies to a GPU are from memory that stays where it is (pinned): from any other the
    host would wait for them, and for all that the GPU has still to do before. `on_host` gives that memory back."""
    if values.device.type != "cpu" or device.type == "cpu" or not values.numel():
        return values.to(device)
    pinned = values.pin_memory()
    return remember_host_copy(pinned.to(device, non_blocking=True), pinned)


def remember_host_copy(tensor: Tensor, host_copy: Tensor) -> Tensor:
    """A tensor with a read-only copy on the host."""
    if not tensor.is_inference():
        _HOST_COPIES[tensor] = host_copy, tensor._version
    return tensor


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor in its own memory."""
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """The values in the host's memory: the tensor itself, or the copy from which it was moved. Of others, of those
    that were written since, and in compiled code, the host asks the device, and waits."""
    if is_on_host(tensor):
        return tensor
    if torch.compiler.is_compiling():
        return tensor.cpu()
    host_copy, version = _HOST_COPIES.get(tensor, (None, 0))
    return tensor.cpu() if host_copy is None or tensor._version != version else host_copy


def true_places(condition: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Indices, by dimension and on a device, of what is true in a host tensor: the host has to know how many there
    are."""
    return tuple(moved(indices, device) for indices in condition.nonzero(as_tuple=True))
