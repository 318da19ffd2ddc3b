"""Rotary position embeddings (Su et al. 2021) in the half-split layout of Hugging Face, with context extension."""

import math

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, RopeConfig, RopeScaling, require_variant
from megatfm.config.position import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.sequence import SequenceMetadata

# B batch, N query heads, K key-value heads, T tokens, H head width


def compute_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the angles per position theta^(−2i/H) of the channel pairs, float64 [H/2].

    Computed on the device, because a copy from the host would wait for it.
    """
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)


def compute_rotary_table(positions_BT: Tensor, frequencies_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of position · frequency, float64 [B, 1, T, H/2].

    In float32 the angle at position 10⁶ would be wrong by a tenth of a radian.
    """
    angles_B1TH = positions_BT[:, None, :, None].double() * frequencies_H
    return angles_B1TH.cos(), angles_B1TH.sin()


def rotate(x_BNTH: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
    """Rotate each channel pair (i, i + H/2) by its angle, in float32 at least; return x's dtype."""
    dtype = torch.promote_types(x_BNTH.dtype, torch.float32)
    first, second = x_BNTH.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_B1TH.to(dtype), sin_B1TH.to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNTH.dtype)


class Rope(nn.Module):
    """Rotate queries and keys by their positions, for any number of heads."""

    def __init__(self, config: ModelConfig, initial: Initialiser, width: int | None = None) -> None:
        super().__init__()
        options = require_variant(config.position, RopeConfig, "model.position")
        self.width, self.theta, self.scaling = width or config.head_width, options.theta, options.scaling
        self.key = f"rope {self.width} {self.theta} {self.scaling}"

    def forward(self, q_BNTH: Tensor, k_BKTH: Tensor, sequence: SequenceMetadata) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q_BNTH.dtype, torch.float32)
        cos, sin = sequence.cached((self.key, dtype), lambda: self._make_table(sequence, dtype))
        return rotate(q_BNTH, cos, sin), rotate(k_BKTH, cos, sin)

    def _make_table(self, sequence: SequenceMetadata, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the table for all layers, converted once to the dtype in which they rotate."""
        positions = sequence.positions
        angles, factor = compute_scaled_frequencies(self.width, self.theta, self.scaling, positions.device)
        cos, sin = compute_rotary_table(positions, angles)
        return (cos * factor).to(dtype), (sin * factor).to(dtype)


def compute_scaled_frequencies(
    width: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return scaled angles per position, float64 [H/2], and the factor on rotated queries and keys."""
    plain = compute_frequencies(width, theta, device)
    match scaling:
        case LinearScaling():
            return plain / scaling.factor, 1.0
        case NtkScaling():
            return compute_frequencies(width, theta * scaling.factor ** (width / (width - 2)), device), 1.0
        case YarnScaling():
            return _interpolate_yarn(plain, width, theta, scaling)
        case Llama3Scaling():
            return _interpolate_llama3(plain, scaling), 1.0
    return plain, 1.0


def _interpolate_yarn(plain: Tensor, width: int, theta: float, scaling: YarnScaling) -> tuple[Tensor, float]:
    """Interpolate the frequencies of channels that rotate seldom within the original length (YaRN, section 3.2).

    Source: Peng et al. 2023. Returns also the factor on rotated queries and keys.
    """

    def find_channel(n_rotations: float) -> float:
        """Return the channel that rotates this often within the original length."""
        return width * math.log(scaling.original_length / (n_rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = find_channel(scaling.beta_fast), find_channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float64, device=plain.device) - first) / max(last - first, 0.001)
    interpolated_share = ramp.clamp(0, 1)
    factor = scaling.attention_factor or (0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0)
    return plain / scaling.factor * interpolated_share + plain * (1 - interpolated_share), factor


def _interpolate_llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Interpolate between the plain and divided frequency by the number of rotations (Llama 3.1's released code)."""
    n_rotations = scaling.original_length * plain / (2 * math.pi)
    kept_share = (n_rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = kept_share.clamp(0, 1)
    return plain * kept_share + plain / scaling.factor * (1 - kept_share)
