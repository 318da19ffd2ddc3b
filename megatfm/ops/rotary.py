"""Rotary position embedding, rotating halves as Hugging Face checkpoints do (Su et al. 2021, section 3.4.2)."""

import torch
from torch import Tensor

# B batch, N heads, T tokens, H head width


def frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Angles per position theta^(−2i/H) of the pairs of channels, [H/2] in float64. Made on the device: a copy to it
    would have the host wait."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


def rotary_table(positions_BT: Tensor, frequencies_H: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, T, H/2] of position · frequency, in float64.

    In float32 the angle of position 10⁶ would be off by a tenth of a radian.
    """
    angles_B1TH = positions_BT[:, None, :, None].double() * frequencies_H
    return angles_B1TH.cos(), angles_B1TH.sin()


def rotate(x_BNTH: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + H/2) by its angle; in float32 at least, returned in x's dtype."""
    dtype = torch.promote_types(x_BNTH.dtype, torch.float32)
    first, second = x_BNTH.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_B1TH.to(dtype), sin_B1TH.to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNTH.dtype)
