"""Position encodings, applied to embeddings, to queries and keys, or to attention scores (see `PositionEncoding`).

Encodings with their own attention are in `attention/relative.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import (
    LearnedPositionConfig,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    T5PositionConfig,
    require_variant,
)
from megatfm.config.position import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from megatfm.errors import UsageError
from megatfm.layers.initialisation import FixedValues, Initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry

# B batch, N query heads, K key-value heads, T tokens, H head width

Constructor = Callable[[ModelConfig, Initialiser], nn.Module]


@dataclass(frozen=True)
class PositionEncoding:
    """Constructors of the modules that implement an encoding; None where it has no such module.

    absolute: one a stack, (sequence) → [B or 1, T, D], added to the embeddings.
    rotary: one for each self-attention, (q, k, sequence) → (q, k).
    score_bias: one a stack, shared by its layers, (sequence, causal) → biases by distance [N, T + S − 1]
    (`megatfm.ops.attention.mask`) or [1, N, T, S], added to the scores.
    attention: one for each self-attention, replaces DotProductAttention (`layers.attention.dot_product`).
    window_bias: one for each windowed attention, (windows, sequence) → [N, S, S], added to the scores of a window.
    axis_bias: one for each pooled attention, (queries, size of the keys' map) → [I, N, Q, K], added to the scores.
    """

    absolute: Constructor | None = None
    rotary: Constructor | None = None
    score_bias: Constructor | None = None
    attention: Callable[..., nn.Module] | None = None
    window_bias: Constructor | None = None
    axis_bias: Callable[..., nn.Module] | None = None


POSITIONS: Registry[PositionEncoding] = Registry("position")

# Rotary positions (Su et al. 2021) in the half-split layout of Hugging Face, with context extension.


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


# A causal decoder without position encoding can still count (Kazemnejad et al. 2023).

POSITIONS.register("none")(PositionEncoding())
POSITIONS.register("rope")(PositionEncoding(rotary=Rope))

# Learned absolute positions (Gehring et al. 2017), as in BERT and GPT.


class LearnedPositions(nn.Module):
    """A learned table; the first `position.offset` rows are unused (RoBERTa reserves two for padding)."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, LearnedPositionConfig, "model.position")
        self.limit, self.offset = options.max_positions, options.offset
        rows = self.limit + self.offset
        self.weight = nn.Parameter(torch.empty(rows, config.embedding_width))
        self.initial = {"weight": initial("position", rows, config.embedding_width)}
        self.roles = {"weight": "embedding"}

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """Return [B, T, D]. Raises UsageError for an unpacked row longer than the table."""
        if sequence.length > self.limit and sequence.documents is None:
            raise UsageError(
                f"a sequence has {sequence.length} tokens, but model.position.max_positions = {self.limit}: shorten "
                "it, or train with more positions"
            )
        return F.embedding(sequence.positions + self.offset, self.weight)


POSITIONS.register("learned")(PositionEncoding(absolute=LearnedPositions))

# Sinusoidal positions (Vaswani et al. 2017, section 3.5).


class SinusoidalPositions(nn.Module):
    """sin and cos of position · 10000^(−2i/D) in channels 2i and 2i + 1."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.width = config.embedding_width

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """Return float64 [B, T, D]."""
        positions_BT1 = sequence.positions[..., None].double()
        angles_BTH = positions_BT1 * compute_frequencies(self.width + self.width % 2, 10_000.0, positions_BT1.device)
        table_BTD = torch.stack((angles_BTH.sin(), angles_BTH.cos()), dim=-1).flatten(-2)
        return table_BTD[..., : self.width]


POSITIONS.register("sinusoidal")(PositionEncoding(absolute=SinusoidalPositions))

# Attention with linear biases (Press et al. 2022).


def compute_alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return slopes 2^(−8i/n) if n is a power of two.

    Otherwise the slopes of the next lower power, then every other slope of the next higher power.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    intermediate = [2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]
    return (*slopes, *intermediate)


class Alibi(nn.Module):
    """−slope · |query − key|, with a fixed slope for each head."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.slopes: Tensor
        self.register_buffer("slopes", torch.empty(config.attention.n_heads), persistent=False)
        self.initial = {"slopes": FixedValues(compute_alibi_slopes(config.attention.n_heads))}

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """Return biases by distance, [N, T + S − 1] (`SequenceMetadata.unique_relative_positions`)."""
        return -self.slopes[:, None] * sequence.unique_relative_positions().abs()


POSITIONS.register("alibi")(PositionEncoding(score_bias=Alibi))

# T5's relative position biases (Raffel et al. 2020, section 2.1; the bucketing is in its released code).


def relative_position_bucket(distances: Tensor, n_buckets: int, farthest: int, *, causal: bool) -> Tensor:
    """Return the bucket of each distance key − query, int64 of the same shape.

    In each direction, half of the buckets hold one distance each, the others exponentially growing ranges up to
    `farthest`. causal: all buckets are for earlier keys; later ones share bucket 0.
    """
    if causal:
        bucket, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    else:
        n_buckets //= 2
        bucket, distances = (distances > 0) * n_buckets, distances.abs()
    exact = n_buckets // 2
    # In float32 and in this order, as the released code computes it: 2 of 128 distances depend on it.
    ranges = torch.log(distances.clamp(min=1).float() / exact) / math.log(farthest / exact) * (n_buckets - exact)
    logarithmic = (exact + ranges.long()).clamp(max=n_buckets - 1)
    return bucket + torch.where(distances < exact, distances, logarithmic)


class RelativeBias(nn.Module):
    """A learned bias for each bucket and head, shared by all layers of a stack."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, T5PositionConfig, "model.position")
        self.n_buckets, self.farthest = options.buckets, options.max_distance
        self.weight = nn.Parameter(torch.empty(self.n_buckets, config.attention.n_heads))
        self.initial = {"weight": initial("relative", self.n_buckets, config.attention.n_heads)}
        self.roles = {"weight": "vector"}  # scalars, not embedding rows: no weight decay

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """Return biases by distance, [N, T + S − 1] (`SequenceMetadata.unique_relative_positions`)."""
        bucket = relative_position_bucket(
            sequence.unique_relative_positions(), self.n_buckets, self.farthest, causal=causal
        )
        return F.embedding(bucket, self.weight).movedim(-1, 0)


POSITIONS.register("t5")(PositionEncoding(score_bias=RelativeBias))

# Transformer-XL's relative sinusoids (Dai et al. 2019, section 3.3), for two-stream attention (XLNet).


class RelativeSinusoids(nn.Module):
    """A sinusoidal vector for each distance query − key, in ascending order: all sines, then all cosines."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.width = config.d_model

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """Return float64 [R, D], with R = 2 L − 1 distances in rows of L tokens."""
        farthest, device = sequence.length - 1, sequence.positions.device
        distances_R = torch.arange(-farthest, farthest + 1, dtype=torch.float64, device=device)
        angles_RH = distances_R[:, None] * compute_frequencies(self.width + self.width % 2, 10_000.0, device)
        return torch.cat((angles_RH.sin(), angles_RH.cos()), dim=-1)[:, : self.width]


POSITIONS.register("transformer_xl")(PositionEncoding(score_bias=RelativeSinusoids))
