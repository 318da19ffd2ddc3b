"""Masked language modelling (Devlin et al. 2019; dynamic masking: Liu et al. 2019)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import MaskedObjective, ModelConfig
from megatfm.data import Piece
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import Masking, key_of, single
from megatfm.objectives.registry import (
    OBJECTIVES,
    Batch,
    Fields,
    Objective,
    SpecialTokens,
    longest,
)
from megatfm.ops.cross_entropy import IGNORE


@OBJECTIVES.register("masked")
class Masked(Objective):
    """[CLS] text [SEP]; masked tokens are predicted."""

    families = ("encoder",)
    predicts_tokens = True
    weights: Mapping[str, float]
    crosses_documents = True

    def __init__(
        self,
        special: SpecialTokens,
        config: MaskedObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.config, self.masking = config, Masking.of(config, special)
        self.cls, self.sep = special.need("cls", config.name), special.need("sep", config.name)
        self.weights = {"masked": 1.0}
        self.max_tokens = longest(lambda n: n + 2, row_lengths[:1], config.name)

    def lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build(self, piece: Piece, key: PieceKey) -> Fields:
        shown, targets = self.masking(piece.tokens, key_of(key, "masked", self.config.static))
        return single(shown, targets, self.cls, self.sep)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"masked": (batch["targets"] != IGNORE).sum()}
