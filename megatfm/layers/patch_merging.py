"""Patch merging between stages (Liu et al. 2021, section 3.1): 2 × 2 tokens become one of twice the width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.maps import MapSize, to_maps, to_rows
from megatfm.layers.norm import make_norm

# B batch, T tokens of a row, S tokens after merging, D model width, I images, H rows and W columns of a map

NEIGHBOURS = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Row and column offsets of the merged tokens, in the order of the released weights."""


class PatchMerging(nn.Module):
    """A linear projection of each 2 × 2 tokens, with a norm before or after. Odd sides are padded with zeros.

    config: that of the previous stage. tokens_per_patch: input tokens per patch, for costs.
    """

    tp_plan = (
        ("", "gather_input"),
        ("norm", "replicated_partial_grad"),
        ("channels", "local_channels"),
        ("reduction", "rowwise"),
        ("norm_out", "sequence_parallel"),
    )

    def __init__(self, config: ModelConfig, *, norm: str, tokens_per_patch: float) -> None:
        super().__init__()
        d, self.tokens_per_patch = config.d_model, tokens_per_patch
        self.norm = make_norm(config, 4 * d) if norm == "input" else None
        self.channels = ChannelShard()
        self.reduction = Linear(4 * d, 2 * d, make_initialiser(config, "encoder")("dense", 4 * d, 2 * d))
        self.norm_out = make_norm(config, 2 * d) if norm == "output" else None

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of a quarter of the input tokens."""
        merged = tokens.with_count(tokens.n * self.tokens_per_patch / 4)
        return sum_costs(self.children(), merged)

    def forward(self, x_BTD: Tensor, size: MapSize) -> Tensor:
        """Merge the tokens of maps of this size; return [B, S, 2 D]."""
        x_IHWD = to_maps(x_BTD, size)
        if size[0] % 2 or size[1] % 2:
            x_IHWD = F.pad(x_IHWD, (0, 0, 0, size[1] % 2, 0, size[0] % 2))
        neighbours = [x_IHWD[:, row::2, column::2] for row, column in NEIGHBOURS]
        x_BSE = to_rows(torch.cat(neighbours, -1), len(x_BTD))
        x_BSE = x_BSE if self.norm is None else self.norm(x_BSE)
        y_BSD: Tensor = self.reduction(self.channels(x_BSE))
        return y_BSD if self.norm_out is None else self.norm_out(y_BSD)


class ChannelShard(nn.Module):
    """Select a rank's channels, the input of a row-parallel weight; all channels without tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.shard_index, self.n_shards = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(self.n_shards, -1)[self.shard_index] if self.n_shards > 1 else x
