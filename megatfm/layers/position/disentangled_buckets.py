"""Relative positions as from DeBERTa v2 on (He et al. 2021, appendix A.11): in buckets, and with a norm."""

import torch
from torch import Tensor, nn

from megatfm.config import DebertaV2PositionConfig, ModelConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.norm import make_norm
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.table import Embedding

# R buckets of both directions, D model width


def log_bucket_position(distances: Tensor, n_buckets: int, farthest: int) -> Tensor:
    """The signed bucket of each distance, int64 within ± n_buckets for distances within ± farthest.

    Half of them stand for one distance each, the others for ranges that grow exponentially up to `farthest`; unlike
    T5's, they are rounded up.
    """
    exact = n_buckets // 2
    # In float32 and in this order, as the released code computes it: distances at a range's edge depend on it.
    ranges = torch.log(distances.abs().clamp(min=1).float() / exact) / torch.log(
        torch.full((), (farthest - 1) / exact, dtype=torch.float32, device=distances.device)
    )
    far = torch.ceil(ranges * (exact - 1)).long() + exact
    return torch.where(distances.abs() <= exact, distances, far * distances.sign())


class BucketedPositionTable(nn.Module):
    """A vector [D] for every bucket, one table for all layers, and a norm on it."""

    tp_plan = (("table", "shared by heads"), ("norm", "shared by heads"))

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, DebertaV2PositionConfig, "model.position")
        rows = 2 * options.buckets
        self.table = Embedding(rows, config.d_model, initial("relative", rows, config.d_model))
        self.norm = make_norm(config)

    def cost(self, tokens: TokenCounts) -> Cost:
        """A norm over the table, once for all tokens and layers: next to nothing."""
        return Cost()

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """[R, D]."""
        return self.norm(self.table.weight)


DISENTANGLED_BUCKETS = POSITIONS.register("deberta_v2")(PositionEncoding(score_bias=BucketedPositionTable))
