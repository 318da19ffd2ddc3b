"""Attention with pooled queries, keys and values (MViTv2: Li et al. 2022, section 4), and its positions by axis."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, PooledAttentionConfig, require_variant
from megatfm.cost import Cost, TokenCounts, total_cost
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.initialisation import Initialiser, Uniform
from megatfm.layers.linear import Linear
from megatfm.layers.maps import MapSequence, MapSize, to_maps, to_rows
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS, PositionEncoding
from megatfm.ops.attention.mask import FULL_MASK

# B batch, T tokens, D model width, I images, N heads, C channels of a head, H rows and W columns of a map, Q queries,
# K keys of an image

KERNEL = 3
"""Side of the convolutions that pool."""


class PooledAttention(nn.Module):
    """Projections to a stage's width, pooling of maps, attention to the image's keys; the pooled query is added.

    config: the stage's. d_in: width of the input. stride: of the queries, 2 where a stage begins. kv_stride: of keys
    and values. size: the map for which tables are trained.
    """

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))

    def __init__(
        self,
        config: ModelConfig,
        initial: Initialiser,
        *,
        d_in: int,
        stride: int,
        kv_stride: int,
        size: MapSize,
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
            make_bias(config, initial, pooled_size(size, stride), pooled_size(size, kv_stride))
            if make_bias
            else None
        )

    def cost(self, tokens: TokenCounts) -> Cost:
        """Cost where `tokens` are those of the output: projections are of the input's."""
        input_tokens, keys = (
            tokens.with_count(tokens.n * self.stride**2),
            tokens.n * (self.stride / self.pool_k.stride) ** 2,
        )
        projections = total_cost((self.wq, self.wk, self.wv), input_tokens) + total_cost((self.wo,), tokens)
        pairs = self.core.channels * tokens.n * keys
        return projections + Cost(attention_macs=pairs, visible_attention_macs=pairs)

    def forward(self, x_BTD: Tensor, sequence: MapSequence) -> Tensor:
        """[B, T, D] of the tokens of `sequence`, from those of the map before where the queries' stride is 2."""
        size = sequence.previous_size if self.stride > 1 else sequence.size
        x_IHWD = to_maps(x_BTD, size)
        heads = (
            project(x_IHWD).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv)
        )
        pools = (self.pool_q, self.pool_k, self.pool_v)
        q_INHWC, k_INHWC, v_INHWC = (pool(tensor) for pool, tensor in zip(pools, heads, strict=True))
        bias = None if self.position is None else self.position(q_INHWC, k_INHWC.shape[2:4])
        q, k, v = (tensor.flatten(2, 3) for tensor in (q_INHWC, k_INHWC, v_INHWC))
        images = sequence.of_images() if self.core.dropout.active else sequence
        y_INQC = self.core.of_heads(self.core.dropout.part, q, k, v, images, bias, FULL_MASK) + q
        return self.wo(to_rows(y_INQC.transpose(1, 2).flatten(2), len(x_BTD)))


def pooled_size(size: MapSize, stride: int) -> MapSize:
    """Return rows and columns of a pooled map."""
    return -(-size[0] // stride), -(-size[1] // stride)


class MapPool(nn.Module):
    """A convolution of each channel over the map, the same for all heads, then a norm over a head's channels."""

    tp_plan = (("", "replicated_partial_grad"), ("norm", "replicated_partial_grad"))

    def __init__(self, config: ModelConfig, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(config.head_width, KERNEL**2))
        self.initial = {"weight": Uniform(1 / KERNEL)}  # torch's, for a convolution of 9 inputs
        self.norm = make_norm(config, config.head_width)

    def forward(self, x_IHWNC: Tensor) -> Tensor:
        """Return [I, N, H, W, C] of the pooled map."""
        images, channels = len(x_IHWNC), x_IHWNC.shape[-1]
        maps = x_IHWNC.permute(0, 3, 4, 1, 2).flatten(0, 1)
        weight = self.weight.view(channels, 1, KERNEL, KERNEL)
        y = F.conv2d(maps, weight, stride=self.stride, padding=KERNEL // 2, groups=channels)
        normed: Tensor = self.norm(y.permute(0, 2, 3, 1))
        return normed.unflatten(0, (images, -1))


class AxisBias(nn.Module):
    """A vector for each offset of rows, and one of columns; the query times both is added to its scores.

    queries, keys: the maps for which tables are trained; for others they are interpolated.
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
        """[I, N, Q, K] of pooled queries, not scaled, and the sides of the keys' map."""
        rows, columns = q_INHWC.shape[2:4]
        row_bias = torch.einsum("inhwc,hkc->inhwk", q_INHWC, _by_offset(self.rows, rows, keys[0]))
        column_bias = torch.einsum("inhwc,wkc->inhwk", q_INHWC, _by_offset(self.columns, columns, keys[1]))
        return (row_bias[..., :, None] + column_bias[..., None, :]).flatten(4, 5).flatten(2, 3)


def _by_offset(table_OC: Tensor, queries: int, keys: int) -> Tensor:
    """Vectors of each query and key along one axis, [Q, K, C]; the shorter side's places are spread over the longer."""
    offsets = 2 * max(queries, keys) - 1
    if len(table_OC) != offsets:
        table_OC = F.interpolate(table_OC.T[None], size=offsets, mode="linear")[0].T
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    q_Q, k_K = (torch.arange(n, device=table_OC.device, dtype=torch.float64) for n in (queries, keys))
    index_QK = q_Q[:, None] * q_step - k_K * k_step + (keys - 1) * k_step
    return table_OC[index_QK.long()]


RELATIVE_AXES = POSITIONS.register("relative_axes")(PositionEncoding(axis_bias=AxisBias))
