"""Positions on an image's grid of patches: learned with interpolation, sinusoidal, and rotary."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import LearnedPosition2dConfig, ModelConfig, Rope2dConfig, require_variant
from megatfm.errors import MegatfmError
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position import POSITIONS, PositionEncoding, compute_frequencies, rotate
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.transfer import move_to_device, to_host

# B batch, T tokens, N query heads, K key-value heads, H head width, D model width, S sizes of images

SIDE = 2**16
"""Encodes (height, width) as height · SIDE + width; larger than any side in patches."""


def require_grid(sequence: SequenceMetadata) -> Tensor:
    """Return the grid [B, T, 4]. Raises MegatfmError for a batch without it."""
    if sequence.grid is None:
        raise MegatfmError("positions on a grid of patches need the field grid: set model.embedding.name = 'patches'")
    return sequence.grid


class LearnedPositions2d(nn.Module):
    """A learned table of `position.grid` vectors, interpolated bicubically to each image's grid.

    Class tokens have separate vectors; register tokens have none.
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, LearnedPosition2dConfig, "model.position")
        self.grid, self.antialias, width = options.grid, options.antialias, config.embedding_width
        n_positions, n_class = math.prod(options.grid), getattr(config.embedding, "n_class_tokens", 0)
        self.weight = nn.Parameter(torch.empty(n_positions, width))
        self.special = nn.Parameter(torch.empty(n_class, width)) if n_class else None
        self.initial = {"weight": initial("position", n_positions, width)}
        self.roles = {"weight": "embedding"}
        if n_class:
            self.initial["special"], self.roles["special"] = initial("position", n_class, width), "embedding"

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """Return [B, T, D]."""
        grid_BT4 = require_grid(sequence)
        sizes_S = self._list_sizes(sequence)
        tables = [self._interpolate(*divmod(size, SIDE)) for size in sizes_S.tolist()]
        table_starts = torch.tensor([0, *(len(table) for table in tables)]).cumsum(0)[:-1]
        row, column, height, width = grid_BT4.long().unbind(-1)
        table_starts_S, sizes_S = (move_to_device(values, row.device) for values in (table_starts, sizes_S))
        image_BT = torch.searchsorted(sizes_S, (height * SIDE + width).contiguous()).clamp(max=len(tables) - 1)
        n_class = 0 if self.special is None else len(self.special)
        patch_BT = table_starts_S[image_BT] + row * width + column + n_class + 1
        index_BT = torch.where(row < 0, column.clamp(max=n_class), patch_BT)
        zero_row = self.weight.new_zeros(1, self.weight.shape[1])
        table = torch.cat([*([] if self.special is None else [self.special]), zero_row, *tables])
        return F.embedding(index_BT.clamp(max=len(table) - 1), table)

    def _list_sizes(self, sequence: SequenceMetadata) -> Tensor:
        """Return the distinct image sizes of the batch, height · SIDE + width, int64 [S] ascending, on the host."""
        height, width = to_host(require_grid(sequence))[..., 2:].long().unbind(-1)
        sizes = height * SIDE + width
        if sequence.documents is not None:
            sizes = sizes[to_host(sequence.documents) >= 0]
        return sizes.unique() if sizes.numel() else torch.tensor([self.grid[0] * SIDE + self.grid[1]])

    def _interpolate(self, height: int, width: int) -> Tensor:
        """Interpolate the table to an image's grid, [height · width, D], in float32 at least."""
        if (height, width) == self.grid:
            return self.weight
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        table_1DHW = self.weight.to(precise).unflatten(0, self.grid).permute(2, 0, 1)[None]
        # Half-pixel centres and no separate scale, as in released ViTs.
        size_1DHW = F.interpolate(
            table_1DHW, size=(height, width), mode="bicubic", align_corners=False, antialias=self.antialias
        )
        return size_1DHW[0].flatten(1).T.to(self.weight.dtype)


POSITIONS.register("learned_2d")(PositionEncoding(absolute=LearnedPositions2d))


class SinusoidalPositions2d(nn.Module):
    """[sin column | cos column | sin row | cos row] at frequencies 10000^(−4i/D), as in MAE's released weights.

    Special tokens have zeros.
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        self.width = config.embedding_width

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        """Return float64 [B, T, D]."""
        grid_BT4 = require_grid(sequence)
        rates = compute_frequencies(self.width // 2, 10_000.0, grid_BT4.device)
        column_BTQ, row_BTQ = (grid_BT4[..., i, None].double() * rates for i in (1, 0))
        waves = (column_BTQ.sin(), column_BTQ.cos(), row_BTQ.sin(), row_BTQ.cos())
        return torch.cat(waves, dim=-1) * (grid_BT4[..., :1] >= 0)


POSITIONS.register("sinusoidal_2d")(PositionEncoding(absolute=SinusoidalPositions2d))


class Rope2d(nn.Module):
    """Rotate channel pairs (i, i + H/2) of queries and keys: i < H/4 by the row, the others by the column.

    Special tokens are not rotated.
    """

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.position, Rope2dConfig, "model.position")
        self.width, self.theta, self.normalized = config.head_width, options.theta, options.normalized
        self.key = f"rope 2d {self.width} {self.theta} {self.normalized}"

    def forward(self, q_BNTH: Tensor, k_BKTH: Tensor, sequence: SequenceMetadata) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q_BNTH.dtype, torch.float32)
        cos, sin = sequence.cached((self.key, dtype), lambda: self._make_table(sequence, dtype))
        return rotate(q_BNTH, cos, sin), rotate(k_BKTH, cos, sin)

    def _make_table(self, sequence: SequenceMetadata, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, 1, T, H/2], computed from float64 angles."""
        grid_BT4 = require_grid(sequence)
        position_BT2, size_BT2 = grid_BT4[..., :2].double(), grid_BT4[..., 2:].double()
        if self.normalized:
            position_BT2 = 2 * math.pi * (2 * (position_BT2 + 0.5) / size_BT2 - 1)
        position_BT2 = position_BT2 * (grid_BT4[..., :1] >= 0)
        frequencies = compute_frequencies(self.width // 2, self.theta, position_BT2.device)
        angles_BTH = (position_BT2[..., None] * frequencies).flatten(-2)
        return angles_BTH.cos()[:, None].to(dtype), angles_BTH.sin()[:, None].to(dtype)


POSITIONS.register("rope_2d")(PositionEncoding(rotary=Rope2d))
