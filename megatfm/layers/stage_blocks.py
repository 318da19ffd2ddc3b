"""Layers of hierarchical models: the blocks of a stage, plain ones and MViTv2's, and patch merging between stages."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import Cost, TokenCounts, default_cost, sum_costs
from megatfm.layers.attention.pooled import PooledAttention
from megatfm.layers.block import Block
from megatfm.layers.feed_forward import FFN
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.maps import MapSequence, MapSize, to_maps, to_rows
from megatfm.layers.norm import PreNorm, ResidualDropout, make_norm

# B batch, T tokens of a row, S tokens before pooling or after merging, D model width, I images, H rows and W columns


class StageBlock(Block):
    """A block of one stage. config: that of the stage. tokens_per_patch: tokens of the stage's map, for costs."""

    def __init__(self, config: ModelConfig, depth: int, tokens_per_patch: float) -> None:
        super().__init__(config, "encoder", depth)
        self.tokens_per_patch = tokens_per_patch

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the stage's tokens."""
        return default_cost(self, tokens.with_count(tokens.n * self.tokens_per_patch))


class PooledBlock(nn.Module):
    """Pooled attention and a feed-forward network (Li et al. 2022, section 4), each around a skip connection.

    config: that of the stage. d_in, d_out: input and output width. stride: 2 if the block shrinks the map. size: input
    map size for which position tables are trained. tokens_per_patch: as in `StageBlock`.
    """

    tp_plan = (("attn_skip", "sequence_parallel"), ("ffn_skip", "sequence_parallel"))

    def __init__(
        self,
        config: ModelConfig,
        *,
        d_in: int,
        d_out: int,
        stride: int,
        kv_stride: int,
        size: MapSize,
        tokens_per_patch: float,
    ) -> None:
        super().__init__()
        initial, d, d_ff = make_initialiser(config, "encoder"), config.d_model, config.ffn.d_ff
        self.kind, self.tokens_per_patch, self.d_out = (d_in, d_out, stride), tokens_per_patch, d_out
        self.attn_residual = PreNorm(_with_width(config, d_in), "attention residual", "encoder")
        self.attn_residual.branch = ResidualDropout(config, "attention residual")  # of the output's width
        self.attn = PooledAttention(config, initial, d_in=d_in, stride=stride, kv_stride=kv_stride, size=size)
        self.attn_skip = Linear(d_in, d, initial("dense", d_in, d), bias=True) if d_in != d else None
        self.pool = MaxPool() if stride > 1 else None
        self.ffn_residual = PreNorm(config, "ffn residual", "encoder")
        self.ffn_residual.branch = ResidualDropout(_with_width(config, d_out), "ffn residual")
        self.ffn = FFN(config, initial)
        if d_out != d:
            self.ffn.w_down = Linear(d_ff, d_out, initial("ffn_out", d_ff, d_out), bias=config.ffn.bias)
        self.ffn_skip = Linear(d, d_out, initial("dense", d, d_out), bias=True) if d_out != d else None

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the stage's tokens."""
        stage_tokens = tokens.with_count(tokens.n * self.tokens_per_patch)
        return sum_costs(self.children(), stage_tokens)

    def forward(self, x_BSD: Tensor, sequence: MapSequence) -> Tensor:
        """Return [B, T, D]. sequence: metadata of the output. Skip projections take the normed input, as in MViTv2."""
        normed = self.attn_residual.input_norm(x_BSD)
        skip = x_BSD if self.attn_skip is None else self.attn_skip(normed)
        skip = skip if self.pool is None else self.pool(skip, sequence)
        x_BTD = self.attn_residual.add(skip, self.attn(normed, sequence), sequence)
        normed = self.ffn_residual.input_norm(x_BTD)
        skip = x_BTD if self.ffn_skip is None else self.ffn_skip(normed)
        return self.ffn_residual.add(skip, self.ffn(normed, sequence), sequence)


def _with_width(config: ModelConfig, width: int) -> ModelConfig:
    """Return the config of a residual stream of another width."""
    return config.with_changes({"d_model": width, "attention.n_heads": 1})


class MaxPool(nn.Module):
    """3 × 3 max pooling with stride 2."""

    tp_plan = (("before", "gather_output_for_tokens"), ("after", "split_output"))

    def __init__(self) -> None:
        super().__init__()
        # Tensor parallelism gathers full rows before pooling, and splits them after it.
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, x_BSD: Tensor, sequence: MapSequence) -> Tensor:
        """Pool the previous map to that of `sequence`; return [B, T, D]."""
        x_IHWD = to_maps(self.before(x_BSD), sequence.previous_size)
        y_IDHW = F.max_pool2d(x_IHWD.permute(0, 3, 1, 2), 3, stride=2, padding=1)
        pooled: Tensor = self.after(to_rows(y_IDHW.permute(0, 2, 3, 1), len(x_BSD)))
        return pooled


NEIGHBOURS = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Row and column offsets of the merged tokens, in the order of the released weights."""


class PatchMerging(nn.Module):
    """A linear projection of each 2 × 2 tokens to one of twice the width (Liu et al. 2021, section 3.1).

    Has a norm before or after it. Odd sides are padded with zeros. config: that of the previous stage.
    follows_block: number of the block before it. tokens_per_patch: input tokens per patch, for costs.
    """

    tp_plan = (
        ("", "gather_input"),
        ("norm", "replicated_partial_grad"),
        ("channels", "local_channels"),
        ("reduction", "rowwise"),
        ("norm_out", "sequence_parallel"),
    )

    def __init__(self, config: ModelConfig, *, norm: str, follows_block: int, tokens_per_patch: float) -> None:
        super().__init__()
        d, self.follows_block, self.tokens_per_patch = config.d_model, follows_block, tokens_per_patch
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
