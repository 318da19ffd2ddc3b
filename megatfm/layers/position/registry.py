"""Where a position encoding acts: on the embeddings, on queries and keys, or on the scores."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.registry import Registry

Make = Callable[[ModelConfig, Initialiser], nn.Module]


@dataclass(frozen=True)
class PositionEncoding:
    """Makes the modules of an encoding; what it does not do is None.

    absolute: made once a stack, (sequence) → [B or 1, T, D], added to the embeddings.
    rotary: made in every self-attention, (q, k, sequence) → (q, k).
    score_bias: made once a stack and shared by its layers, (sequence, causal) → [N, T + S − 1] by distance
    (`megatfm.ops.attention.distances`) or [1, N, T, S], added to the scores.
    attention: made in every self-attention in place of the plain core; see `layers.attention`.
    """

    absolute: Make | None = None
    rotary: Make | None = None
    score_bias: Make | None = None
    attention: Callable[..., nn.Module] | None = None


POSITIONS: Registry[PositionEncoding] = Registry("position")
