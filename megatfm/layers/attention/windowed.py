"""Attention within windows of a map, and relative position biases (Swin: Liu et al. 2021; Swin-V2: Liu et al. 2022).

Tokens of the same cell see each other. Cells are the squares of a grid, which is shifted by half a window in every
other block (Swin, section 3.2). A shifted map is rolled, so that it still consists of whole windows. Windows at the
wrapped edge hold several cells, which a mask separates.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import (
    LogRelative2dConfig,
    ModelConfig,
    WindowedAttentionConfig,
    Windows2dPatternConfig,
    require_variant,
)
from megatfm.cost import Cost, TokenCounts, sum_costs
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import ATTENTIONS, DotProductAttention, HeadProjections
from megatfm.layers.attention.kv_cache import LayerCache
from megatfm.layers.attention.patterns.pattern import PATTERNS, AttentionPattern
from megatfm.layers.initialisation import Constant, Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.position import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import MapSequence, MapSize, to_maps, to_rows
from megatfm.ops.attention.mask import FULL_MASK

# B batch, T tokens, D model width, I images, H rows and W columns of a map, N heads, C channels of a head, G windows
# S tokens of a window


@dataclass(frozen=True)
class Windows2d(AttentionPattern):
    """Square windows of `side` patches. shifted: by half a side, unless the map is no larger than a window."""

    side: int
    shifted: bool = False

    def at_depth(self, depth: int) -> Self:
        return replace(self, shifted=depth % 2 == 1)

    def count_pairs(self, length: int, n_heads: int = 1) -> float:
        return length * min(length, self.side**2)

    def for_map(self, size: MapSize) -> "MapWindows":
        """Return the windows of a map."""
        window = min(self.side, *size)
        return MapWindows(size, window, window // 2 if self.shifted and min(size) > self.side else 0)


@dataclass(frozen=True)
class MapWindows:
    """Windows of maps of one size. Maps are padded at the bottom and right to whole windows."""

    size: MapSize
    window: int
    shift: int

    @property
    def padded_size(self) -> MapSize:
        """Rows and columns after padding."""
        rows, columns = (-(-side // self.window) * self.window for side in self.size)
        return rows, columns

    @property
    def count(self) -> int:
        """Number of windows of a map."""
        rows, columns = self.padded_size
        return rows * columns // self.window**2

    def pad_and_roll(self, x_IHWD: Tensor) -> Tensor:
        """Pad maps with zeros, and roll them so that windows align with the shifted cells."""
        rows, columns = self.padded_size
        if (rows, columns) != self.size:
            x_IHWD = F.pad(x_IHWD, (0, 0, 0, columns - self.size[1], 0, rows - self.size[0]))
        return x_IHWD.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x_IHWD

    def split(self, x_IHWD: Tensor, head_width: int) -> Tensor:
        """Divide rolled maps into windows [I, N · G, S, C], ordered by head, then window."""
        m = self.window
        windows = x_IHWD.unflatten(3, (-1, head_width)).unflatten(2, (-1, m)).unflatten(1, (-1, m))
        return windows.permute(0, 5, 1, 3, 2, 4, 6).flatten(4, 5).flatten(1, 3)

    def join(self, windows_INSC: Tensor) -> Tensor:
        """Invert `split` and `pad_and_roll`; return maps [I, H, W, D]."""
        m, (rows, columns) = self.window, self.padded_size
        x = windows_INSC.unflatten(2, (m, m)).unflatten(1, (-1, rows // m, columns // m))
        x_IHWD = x.permute(0, 2, 4, 3, 5, 1, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        if self.shift:
            x_IHWD = x_IHWD.roll((self.shift, self.shift), (1, 2))
        return x_IHWD[:, : self.size[0], : self.size[1]]

    def mask(self, device: torch.device) -> Tensor | None:
        """Return whether two tokens of a window are in the same cell, bool [G, S, S]; None if all always are."""
        if not self.shift:
            return None
        sides = (torch.arange(side, device=device) for side in self.padded_size)
        row_H, column_W = ((side - self.shift).div(self.window, rounding_mode="floor") for side in sides)
        cell_HW = row_H[:, None] * (self.padded_size[1] + 1) + column_W
        rolled_1HW1 = cell_HW.roll((-self.shift, -self.shift), (0, 1))[None, :, :, None]
        cells_GS = self.split(rolled_1HW1, 1)[0, :, :, 0]
        return cells_GS[:, :, None] == cells_GS[:, None, :]

    def offsets(self, device: torch.device) -> Tensor:
        """Return row and column offsets, query − key, of all token pairs of a window, int64 [S, S, 2]."""
        side = torch.arange(self.window, device=device)
        positions_S2 = torch.cartesian_prod(side, side)
        return positions_S2[:, None] - positions_S2[None]


@PATTERNS.register("windows_2d")
def windows_2d(config: ModelConfig, causal: bool) -> Windows2d:
    """Make the window pattern. Raises UsageError for attention other than 'windowed'."""
    options = require_variant(config.attention.pattern, Windows2dPatternConfig, "model.attention.pattern")
    if config.attention.name != "windowed":
        raise UsageError(
            f"model.attention.pattern = 'windows_2d' is for model.attention.name = 'windowed', and this is "
            f"{config.attention.name!r}: choose that, or another pattern"
        )
    return Windows2d(options.window)


LARGEST_COSINE_SCALE = math.log(100.0)
"""Upper bound of the logarithm of a head's cosine scale (Swin-V2, section 3.3)."""
LOG_BIAS_WIDTH = 512
"""Hidden width of the MLP that maps offsets to biases."""
LARGEST_LOG_BIAS = 16.0
"""Upper bound of the MLP's biases."""


@ATTENTIONS.register("windowed")
class WindowedAttention(HeadProjections):
    """Attention of tokens in the same window of a padded map.

    Padding takes part, as in the released code: its keys and values are the projections' biases.
    """

    tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
    lora_without_dropout = ("wq", "wk", "wv")  # they read padded maps

    def __init__(self, config: ModelConfig, initial: Initialiser, pattern: AttentionPattern) -> None:
        if not isinstance(pattern, Windows2d):
            raise UsageError(
                f"model.attention.pattern = {config.attention.pattern.name!r}: attention.name = 'windowed' needs "
                "pattern = 'windows_2d', or leave the pattern out"
            )
        options = require_variant(config.attention, WindowedAttentionConfig, "model.attention")
        super().__init__(config, initial, bias=options.bias, key_bias=options.bias and not options.cosine)
        self.pattern = pattern
        self.cosine = CosineScale(options.n_heads) if options.cosine else None
        self.core = DotProductAttention(config, initial, pattern, scale=1.0 if options.cosine else None)
        make_bias = POSITIONS.get(config.position.name).window_bias
        self.position = make_bias(config, initial) if make_bias else None

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of projections and attention; position biases are computed once for all windows and cost
        little."""
        return sum_costs((self.wq, self.wk, self.wv, self.wo, self.core), tokens)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [B, T, D] for tokens in row-major order of each image's map. Raises UsageError without a map."""
        if not isinstance(sequence, MapSequence):
            raise UsageError(
                "model.attention.name = 'windowed' needs maps: set model.family = 'hierarchical', or choose "
                "attention.name = 'gqa'"
            )
        windows = self.pattern.for_map(sequence.size)
        x_IHWD = windows.pad_and_roll(to_maps(x_BTD, sequence.size))
        q, k, v = (windows.split(project(x_IHWD), self.head_dim) for project in (self.wq, self.wk, self.wv))
        if self.cosine is not None:
            q, k = self.cosine(F.normalize(q, dim=-1), windows.count), F.normalize(k, dim=-1)
        score_bias = self._make_score_bias(windows, sequence, q)
        images = sequence.per_image(windows.window**2) if self.core.dropout.active else sequence
        y = self.core.attend_head_shard(self.core.dropout.shard_index, q, k, v, images, score_bias, FULL_MASK)
        return self.wo(to_rows(windows.join(y), len(x_BTD)))

    def _make_score_bias(self, windows: MapWindows, sequence: MapSequence, q_INSC: Tensor) -> Tensor | None:
        """Return position biases, with −∞ between different cells, [1, N · G, S, S]; None without either."""
        device, dtype = q_INSC.device, q_INSC.dtype
        key = "hidden", windows.size, windows.window, windows.shift, dtype  # torch.compile cannot keep `windows` itself
        hidden_GSS = sequence.cached(key, lambda: _make_cell_mask(windows, device, dtype))
        if self.position is None:
            n_heads = q_INSC.shape[1] // windows.count
            return None if hidden_GSS is None else hidden_GSS.repeat(n_heads, 1, 1)[None]
        bias_NSS = self.position(windows, sequence).to(dtype)
        if hidden_GSS is None:
            return bias_NSS.repeat_interleave(windows.count, 0)[None]
        return (bias_NSS[:, None] + hidden_GSS).flatten(0, 1)[None]


def _make_cell_mask(windows: MapWindows, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return 0 within a cell and −∞ between cells, [G, S, S]; None if every window is one cell."""
    mask_GSS = windows.mask(device)
    if mask_GSS is None:
        return None
    return torch.zeros(mask_GSS.shape, dtype=dtype, device=device).masked_fill(~mask_GSS, -math.inf)


class CosineScale(nn.Module):
    """Learned scale of each head's cosine scores, exp(min(weight, log 100)) (Swin-V2, section 3.3)."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.initial, self.roles = {"weight": Constant(math.log(10.0))}, {"weight": "vector"}

    def forward(self, q_INSC: Tensor, count: int) -> Tensor:
        """Scale queries [I, N · count, S, C]. count: windows of each head."""
        scale_N = self.weight.clamp(max=LARGEST_COSINE_SCALE).exp()
        return q_INSC * scale_N.repeat_interleave(count)[:, None, None]


class RelativeBias2d(nn.Module):
    """A learned bias for each offset in a window and each head, [(2 · side − 1)², N]."""

    tp_plan = (("", "shard_last_dim"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.side = _get_window_side(config)
        n_offsets, n_heads = (2 * self.side - 1) ** 2, config.attention.n_heads
        self.weight = nn.Parameter(torch.empty(n_offsets, n_heads))
        self.initial = {"weight": initial("relative", n_offsets, n_heads)}
        self.roles = {"weight": "vector"}  # scalars, not embedding rows: no weight decay

    def forward(self, windows: MapWindows, sequence: SequenceMetadata) -> Tensor:
        """Return biases [N, S, S]; smaller windows use the middle of the table."""
        device = self.weight.device
        key = "offset index", windows.window, self.side
        index_SS = sequence.cached(key, lambda: _make_offset_index(windows, self.side, device))
        return F.embedding(index_SS, self.weight).movedim(-1, 0)


def _make_offset_index(windows: MapWindows, side: int, device: torch.device) -> Tensor:
    """Return the table row of each query-key offset, int64 [S, S]. side: window side of the table."""
    row_SS, column_SS = (windows.offsets(device) + side - 1).unbind(-1)
    return row_SS * (2 * side - 1) + column_SS


def _get_window_side(config: ModelConfig) -> int:
    """Return the side of the windows. Raises UsageError for attention without windows."""
    if config.attention.name != "windowed":
        raise UsageError(
            f"model.position.name = {config.position.name!r} is for model.attention.name = 'windowed', and this is "
            f"{config.attention.name!r}: choose that, or another position"
        )
    return require_variant(config.attention.pattern, Windows2dPatternConfig, "model.attention.pattern").window


POSITIONS.register("relative_2d")(PositionEncoding(window_bias=RelativeBias2d))


class LogRelativeBias2d(nn.Module):
    """A bias 16 σ(W₂ max(0, W₁ o + b)) for each head from the log-spaced row and column offset o (section 3.3).

    Offsets are divided by the window side, or by the pretraining window side if `pretrained_windows` is set.
    """

    tp_plan = (("hidden", "replicated_partial_grad"), ("out", "colwise"))
    lora_without_dropout = ("hidden", "out")  # they read offsets

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, LogRelative2dConfig, "model.position")
        _get_window_side(config)  # raises without windows
        self.pretrained = options.pretrained_windows[0] if options.pretrained_windows else None
        n_heads = config.attention.n_heads
        self.hidden = Linear(2, LOG_BIAS_WIDTH, initial("dense", 2, LOG_BIAS_WIDTH), bias=True)
        self.out = Linear(LOG_BIAS_WIDTH, n_heads, initial("dense", LOG_BIAS_WIDTH, n_heads))

    def forward(self, windows: MapWindows, sequence: SequenceMetadata) -> Tensor:
        """Return biases [N, S, S]; the MLP runs once for each distinct offset."""
        device, side = self.hidden.weight.device, windows.window
        key = windows.window, self.pretrained
        offsets_O2 = sequence.cached(("log offsets", *key), lambda: self._compute_log_offsets(side, device))
        index_SS = sequence.cached(("offset index", side, side), lambda: _make_offset_index(windows, side, device))
        bias_ON = self.out(F.relu(self.hidden(offsets_O2.to(self.hidden.weight.dtype))))
        return LARGEST_LOG_BIAS * torch.sigmoid(F.embedding(index_SS, bias_ON).movedim(-1, 0))

    def _compute_log_offsets(self, side: int, device: torch.device) -> Tensor:
        """Return all offsets of a window, log-spaced, [O, 2]; in float32, as in the released code."""
        along = torch.arange(1 - side, side, device=device, dtype=torch.float32)
        scaled = along / max((self.pretrained or side) - 1, 1) * 8
        spaced = torch.sign(scaled) * torch.log2(scaled.abs() + 1.0) / math.log2(8)
        return torch.cartesian_prod(spaced, spaced)


POSITIONS.register("log_relative_2d")(PositionEncoding(window_bias=LogRelativeBias2d))
