"""T5's relative position biases (Raffel et al. 2020, section 2.1; the bucketing is in its released code)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, T5PositionConfig, require_variant
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata

# N heads, T queries, S keys, R buckets


def relative_position_bucket(distances: Tensor, n_buckets: int, farthest: int, *, causal: bool) -> Tensor:
    """The bucket of each distance key − query, int64 of the same shape.

    Half of the buckets (of each direction) stand for one distance each, the others for ranges that grow
    exponentially up to `farthest`. Causal: later keys share bucket 0, all buckets are for earlier ones.
    """
    if causal:
        bucket, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    else:
        n_buckets //= 2
        bucket, distances = (distances > 0) * n_buckets, distances.abs()
    exact = n_buckets // 2
    # In float32 and in this order, as the released code computes it: 2 of 128 distances depend on it.
    ranges = (
        torch.log(distances.clamp(min=1).float() / exact) / math.log(farthest / exact) * (n_buckets - exact)
    )
    far = (exact + ranges.long()).clamp(max=n_buckets - 1)
    return bucket + torch.where(distances < exact, distances, far)


class RelativeBias(nn.Module):
    """A learned number for each bucket and head, shared by all layers of a stack."""

    tp_plan = (("", "last dim"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, T5PositionConfig, "model.position")
        self.n_buckets, self.farthest = options.buckets, options.max_distance
        self.weight = nn.Parameter(torch.empty(self.n_buckets, config.attention.n_heads))
        self.initial = {"weight": initial("relative", self.n_buckets, config.attention.n_heads)}
        self.roles = {"weight": "vector"}  # numbers, not rows: it doesn't decay

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """For each distance, [N, T + S − 1] (`SequenceMetadata.unique_relative_positions`)."""
        bucket = relative_position_bucket(
            sequence.unique_relative_positions(), self.n_buckets, self.farthest, causal=causal
        )
        return F.embedding(bucket, self.weight).movedim(-1, 0)


T5 = POSITIONS.register("t5")(PositionEncoding(score_bias=RelativeBias))
