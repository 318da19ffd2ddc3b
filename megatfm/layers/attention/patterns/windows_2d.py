"""Windows of an image's map (Liu et al. 2021, section 3.2): tokens of the same cell see each other.

Cells are the squares of a grid, which is shifted by half a window in every other block. A shifted map is rolled, so
that it still consists of whole windows. Windows at the wrapped edge hold several cells, which a mask separates.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import ModelConfig, Windows2dPatternConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns.pattern import PATTERNS, AttentionPattern
from megatfm.layers.maps import MapSize

# I images, H rows and W columns of a map, D channels, N heads, C channels of a head, G windows, S tokens of a window


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
