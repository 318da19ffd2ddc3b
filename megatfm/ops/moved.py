"""Copies to a device that the host does not wait for."""

import torch
from torch import Tensor


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device. Copies to a GPU are from memory that stays where it is (pinned): from any other the
    host would wait for them, and for all that the GPU has still to do before."""
    if values.device.type != "cpu" or device.type == "cpu" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
