"""Copies to a device that the host does not wait for, and what the host knows of them without asking."""

from typing import Any

import torch
from torch import Tensor

from megatfm.ops.torch_private import weak_dictionary

_HOST_COPIES: Any = weak_dictionary()
"""Of tensors on a device, while they are there: the host's own copy, and how often the tensor had been written."""


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. Copies to a GPU are from memory that stays where it is (pinned): from any other the
    host would wait for them, and for all that the GPU has still to do before. `on_host` gives that memory back."""
    if values.device.type != "cpu" or device.type == "cpu" or not values.numel():
        return values.to(device)
    pinned = values.pin_memory()
    return remember_host_copy(pinned.to(device, non_blocking=True), pinned)


def remember_host_copy(there: Tensor, here: Tensor) -> Tensor:
    """A tensor of which the host has a copy that nobody writes."""
    if not there.is_inference():
        _HOST_COPIES[there] = here, there._version
    return there


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
    here, version = _HOST_COPIES.get(tensor, (None, 0))
    return tensor.cpu() if here is None or tensor._version != version else here
