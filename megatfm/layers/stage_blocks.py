"""Layers of hierarchical models: blocks of a stage, patch merging between stages, and MViTv2's pooled attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, PooledAttentionConfig, require_variant
from megatfm.cost import Cost, TokenCounts, default_cost, sum_costs
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.block import Block
from megatfm.layers.feed_forward import FFN
from megatfm.layers.initialisation import Initialiser, Uniform, make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.norm import PreNorm, ResidualDropout, make_norm
from megatfm.layers.position import POSITIONS, PositionEncoding
from megatfm.layers.sequence_views import MapSequence, MapSize, to_maps, to_rows
from megatfm.ops.attention.mask import FULL_MASK

# B batch, T tokens of a row, S tokens before pooling or after merging, D model width, I images, H rows and W columns
# N heads, C channels of a head, Q queries and K keys of an image


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


KERNEL = 3
"""Side of the pooling convolutions."""


class PooledAttention(nn.Module):
    """Attention within an image between pooled queries, keys and values; pooled queries are added to the output.

    config: that of the stage. d_in: input width. stride: pooling stride of queries, 2 in a stage's first block.
    kv_stride: pooling stride of keys and values. size: input map size for which position tables are trained.
    """

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))

    def __init__(
        self, config: ModelConfig, initial: Initialiser, *, d_in: int, stride: int, kv_stride: int, size: MapSize
    ) -> None:
        super().__init__()
        options = require_variant(config.attention, PooledAttentionConfig, "model.attention")
        width, bias = config.d_model, options.bias
        self.head_dim, self.stride = config.head_width, stride
        self.wq, self.wk, self.wv = (
            Linear(d_in, width, initial(role, d_in, width), bias=bias) for role in ("query", "key", "value")
        )
        self.wo = Linear(width, width, initial("out", width, width), bias=bias)
        self.pool_q = MapPool(config, stride)
        self.pool_k, self.pool_v = MapPool(config, kv_stride), MapPool(config, kv_stride)
        self.core = DotProductAttention(config, initial, Full())
        make_bias = POSITIONS.get(config.position.name).axis_bias
        self.position = (
            make_bias(config, initial, compute_pooled_size(size, stride), compute_pooled_size(size, kv_stride))
            if make_bias
            else None
        )

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost for `tokens` output tokens; queries, keys and values are projected before pooling."""
        input_tokens = tokens.with_count(tokens.n * self.stride**2)
        keys = tokens.n * (self.stride / self.pool_k.stride) ** 2
        projections = sum_costs((self.wq, self.wk, self.wv), input_tokens) + sum_costs((self.wo,), tokens)
        pairs = self.core.channels * tokens.n * keys
        return projections + Cost(attention_macs=pairs, visible_attention_macs=pairs)

    def forward(self, x_BTD: Tensor, sequence: MapSequence) -> Tensor:
        """Return [B, T, D] for the map of `sequence`; with stride 2 the input is the previous, larger map."""
        size = sequence.previous_size if self.stride > 1 else sequence.size
        x_IHWD = to_maps(x_BTD, size)
        heads = (project(x_IHWD).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        pools = (self.pool_q, self.pool_k, self.pool_v)
        q_INHWC, k_INHWC, v_INHWC = (pool(tensor) for pool, tensor in zip(pools, heads, strict=True))
        bias = None if self.position is None else self.position(q_INHWC, k_INHWC.shape[2:4])
        q, k, v = (tensor.flatten(2, 3) for tensor in (q_INHWC, k_INHWC, v_INHWC))
        images = sequence.per_image() if self.core.dropout.active else sequence
        y_INQC = self.core.attend_head_shard(self.core.dropout.shard_index, q, k, v, images, bias, FULL_MASK) + q
        return self.wo(to_rows(y_INQC.transpose(1, 2).flatten(2), len(x_BTD)))


def compute_pooled_size(size: MapSize, stride: int) -> MapSize:
    """Return rows and columns of a map after pooling."""
    return -(-size[0] // stride), -(-size[1] // stride)


class MapPool(nn.Module):
    """A depthwise convolution over the map, shared by all heads, and a norm over a head's channels."""

    tp_plan = (("", "replicated_partial_grad"), ("norm", "replicated_partial_grad"))

    def __init__(self, config: ModelConfig, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(config.head_width, KERNEL**2))
        self.initial = {"weight": Uniform(1 / KERNEL)}  # torch's default for a convolution of 9 inputs
        self.norm = make_norm(config, config.head_width)

    def forward(self, x_IHWNC: Tensor) -> Tensor:
        """Pool a map [I, H, W, N, C]; return [I, N, H, W, C] with the pooled rows and columns."""
        images, channels = len(x_IHWNC), x_IHWNC.shape[-1]
        maps = x_IHWNC.permute(0, 3, 4, 1, 2).flatten(0, 1)
        weight = self.weight.view(channels, 1, KERNEL, KERNEL)
        y = F.conv2d(maps, weight, stride=self.stride, padding=KERNEL // 2, groups=channels)
        normed: Tensor = self.norm(y.permute(0, 2, 3, 1))
        return normed.unflatten(0, (images, -1))


class AxisBias(nn.Module):
    """Score biases from decomposed relative positions: query · (row-offset vector + column-offset vector).

    queries, keys: map sizes for which the tables are trained; they are interpolated for other sizes.
    """

    tp_plan = (("", "replicated_partial_grad"),)

    def __init__(self, config: ModelConfig, initial: Initialiser, queries: MapSize, keys: MapSize) -> None:
        super().__init__()
        rows, columns = (2 * max(sides) - 1 for sides in zip(queries, keys, strict=True))
        self.rows = nn.Parameter(torch.empty(rows, config.head_width))
        self.columns = nn.Parameter(torch.empty(columns, config.head_width))
        self.initial = {
            "rows": initial("relative", rows, config.head_width),
            "columns": initial("relative", columns, config.head_width),
        }
        self.roles = {"rows": "embedding", "columns": "embedding"}

    def forward(self, q_INHWC: Tensor, keys: tuple[int, int]) -> Tensor:
        """Return biases [I, N, Q, K] for pooled, unscaled queries. keys: rows and columns of the keys' map."""
        rows, columns = q_INHWC.shape[2:4]
        row_bias = torch.einsum("inhwc,hkc->inhwk", q_INHWC, _look_up_offsets(self.rows, rows, keys[0]))
        column_bias = torch.einsum("inhwc,wkc->inhwk", q_INHWC, _look_up_offsets(self.columns, columns, keys[1]))
        return (row_bias[..., :, None] + column_bias[..., None, :]).flatten(4, 5).flatten(2, 3)


def _look_up_offsets(table_OC: Tensor, queries: int, keys: int) -> Tensor:
    """Look up the offset vector of each query and key along one axis, [Q, K, C].

    Positions on the shorter side are scaled to the longer one.
    """
    offsets = 2 * max(queries, keys) - 1
    if len(table_OC) != offsets:
        table_OC = F.interpolate(table_OC.T[None], size=offsets, mode="linear")[0].T
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    q_Q, k_K = (torch.arange(n, device=table_OC.device, dtype=torch.float64) for n in (queries, keys))
    index_QK = q_Q[:, None] * q_step - k_K * k_step + (keys - 1) * k_step
    return table_OC[index_QK.long()]


POSITIONS.register("relative_axes")(PositionEncoding(axis_bias=AxisBias))
