"""Where a position encoding acts: on the embeddings, on queries and keys, or on the scores."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.registry import Registry

Make = Callable[[ModelConfig, Initialiser], nn.Module]


@dataclass(frozen=True)
class Position:
    """Makes the modules of an encoding; what it does not do is None.

    embedding: made once a stack, (sequence) → [B or 1, T, D], added to the embeddings.
    heads: made in every self-attention, (q, k, sequence) → (q, k).
    bias: made once a stack and shared by its layers, (sequence, causal) → [N, T + S − 1] by distance
    (`megatfm.ops.attention.distances`) or [1, N, T, S], added to the scores.
    core: made in every self-attention in place of the plain core; see `layers.attention`.
    """

    embedding: Make | None = None
    heads: Make | None = None
    bias: Make | None = None
    core: Callable[..., nn.Module] | None = None


POSITIONS: Registry[Position] = Registry("position")
