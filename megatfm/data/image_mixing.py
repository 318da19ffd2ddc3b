"""Mixup and cutmix: each row of images is mixed with a partner row, the same on any number of ranks.

Positions of the global order are divided into runs of `turn` rows, as a stream reads them. Runs 2k and 2k + 1 are
partners, row by row. Neighbouring runs belong to different streams, so partners are far apart in the corpus, and change
with every epoch. Image i of a row is mixed with image i of the partner row; it stays unmixed if there is none, or if
that one is in quarantine. Draws depend on the seed, the position and the image alone. A process that reads only one row
of a pair also decodes the other; no rank has to if each has at least two streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from megatfm.data.dataset import RowDataset
from megatfm.data.image_transforms import Draws
from megatfm.data.images import patchify
from megatfm.data.sequences import IGNORE_INDEX, Fields


@dataclass(frozen=True)
class Mixing:
    """Settings of mixup and cutmix: α of each (0: never), share of images that are mixed, and the layout of an image.

    size, patch_size: sides in pixels. n_special: special tokens before an image's patches.
    """

    mixup: float
    cutmix: float
    probability: float
    size: int
    patch_size: int
    n_special: int

    def draw(self, seed: int, position: int, image: int) -> tuple[float, NDArray[np.bool_] | None]:
        """Return the weight of the image, and for cutmix a mask of the pixels that it keeps, [patches, P · P]."""
        draws = Draws((seed, "mix", position, image))
        if not draws.chance(self.probability):
            return 1.0, None
        if self.mixup and (not self.cutmix or draws.chance(0.5)):
            return draw_beta(draws, self.mixup), None
        return self._draw_box(draws, draw_beta(draws, self.cutmix))

    def _draw_box(self, draws: Draws, weight: float) -> tuple[float, NDArray[np.bool_]]:
        """Replace a rectangle of 1 − weight of the area around a random centre (Yun et al. 2019, equation 2).

        Returns the weight after the rectangle was clipped to the image, and the mask of the pixels outside of it.
        """
        side = self.size * sqrt(1 - weight)
        begin_end = []
        for _ in range(2):
            centre = draws.below(self.size)
            begin_end.append((max(0, round(centre - side / 2)), min(self.size, round(centre + side / 2))))
        remaining = np.ones((self.size, self.size, 1), np.bool_)
        (top, bottom), (left, right) = begin_end
        remaining[top:bottom, left:right] = False
        return float(remaining.mean()), patchify(remaining, self.patch_size)


def draw_beta(draws: Draws, alpha: float) -> float:
    """Return a number from Beta(α, α), by Jöhnk's method in logarithms (Devroye 1986, section IX.3.5)."""
    while True:
        x, y = (log(1 - draws.uniform()) / alpha for _ in range(2))
        largest = max(x, y)
        total = largest + log(exp(x - largest) + exp(y - largest))
        if total <= 0:
            return exp(x - total)


class MixedImages:
    """A dataset's rows of images, mixed with their partners.

    The fields are those of the dataset; `mixed_labels` gets the partner's class, and `label_weights` the share of the
    image's own.
    """

    def __init__(self, rows: RowDataset, mixing: Mixing, turn: int = 1) -> None:
        self._rows, self._mixing, self._turn = rows, mixing, turn

    @property
    def seed(self) -> int:
        return self._rows.seed

    @property
    def row_tokens(self) -> int:
        """Token capacity of a row."""
        return self._rows.row_tokens

    @property
    def warnings(self) -> Sequence[str]:
        """Notes for the log."""
        return self._rows.warnings

    @property
    def can_split_rows(self) -> bool:
        """Whether rows may be split."""
        return self._rows.can_split_rows

    def epoch(self, position: int) -> int | str:
        """Return how many times the corpus was read before a position."""
        return self._rows.epoch(position)

    def order_config(self) -> dict[str, str | int | bool]:
        """Return the settings that determine the order."""
        return self._rows.order_config()

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """Return the rows at positions (see `RowDataset.read_rows`)."""
        positions_read = dict.fromkeys(positions)
        positions_read |= dict.fromkeys(self.choose_partner(at) for at in positions if at is not None)
        row_of_position = {at: number for number, at in enumerate(positions_read)}
        stored = self._rows.read_rows(list(positions_read))
        rows = {name: values[[row_of_position[at] for at in positions]] for name, values in stored.items()}
        for number, at in enumerate(positions):
            if at is not None:
                self._mix(rows, stored, number, row_of_position[self.choose_partner(at)], at)
        return rows

    def choose_partner(self, position: int) -> int:
        """Return the position of a row's partner."""
        return position - self._turn if position // self._turn % 2 else position + self._turn

    def _mix(self, rows: Fields, stored: Fields, row: int, partner: int, position: int) -> None:
        n_special = self._mixing.n_special
        starts, partner_starts = (
            np.flatnonzero((fields["positions"][at] == 0) & (fields["documents"][at] >= 0))
            for fields, at in ((rows, row), (stored, partner))
        )
        n_tokens = n_special + (self._mixing.size // self._mixing.patch_size) ** 2
        for image, (begin, partner_begin) in enumerate(zip(starts.tolist(), partner_starts.tolist(), strict=False)):
            weight, keeps_pixel = self._mixing.draw(self.seed, position, image)
            partner_label = stored["labels"][partner, partner_begin]
            if weight == 1.0 or partner_label == IGNORE_INDEX:
                continue
            patches = rows["patches"][row, begin + n_special : begin + n_tokens]
            partner_patches = stored["patches"][partner, partner_begin + n_special : partner_begin + n_tokens]
            if keeps_pixel is None:
                mixed = patches.astype(np.float32) * np.float32(weight) + partner_patches * np.float32(1 - weight)
                patches[:] = np.rint(mixed).astype(np.uint8)
            else:
                by_channel = patches.reshape(len(patches), -1, keeps_pixel.shape[1])
                partner_by_channel = partner_patches.reshape(by_channel.shape)
                np.copyto(by_channel, partner_by_channel, where=~keeps_pixel[:, None])
            rows["mixed_labels"][row, begin] = partner_label
            rows["label_weights"][row, begin] = weight
