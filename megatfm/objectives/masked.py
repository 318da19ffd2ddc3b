"""Masked language modelling (Devlin et al. 2019; dynamic masking: Liu et al. 2019)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import MaskedObjective, ModelConfig
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import Masking, masking_key, single_segment_example
from megatfm.objectives.registry import (
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    max_piece_tokens,
)
from megatfm.ops.cross_entropy import IGNORE


@OBJECTIVES.register("masked")
class Masked(Objective):
    """[CLS] text [SEP]; masked tokens are predicted."""

    model_families = ("encoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]
    allows_cross_document_attention = True

    def __init__(
        self,
        special: SpecialTokens,
        config: MaskedObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.config, self.masking = config, Masking.of(config, special)
        self.cls, self.sep = (
            special.require_token("cls", config.name),
            special.require_token("sep", config.name),
        )
        self.loss_weights = {"masked": 1.0}
        self.max_tokens = max_piece_tokens(lambda n: n + 2, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        shown, targets = self.masking(piece.tokens, masking_key(key, "masked", self.config.static))
        return single_segment_example(shown, targets, self.cls, self.sep)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"masked": (batch["targets"] != IGNORE).sum()}
