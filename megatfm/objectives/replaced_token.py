"""Replaced-token detection (ELECTRA: Clark et al. 2020)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import ModelConfig, ReplacedTokenObjective
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


@OBJECTIVES.register("replaced_token")
class ReplacedToken(Objective):
    """[CLS] text [SEP], masked in `tokens` and whole in `original`.

    The model's generator predicts the masked tokens and samples replacements, by `keys`; its discriminator tells for
    every token but padding whether it is the original one.
    """

    families = ("electra",)
    weights: Mapping[str, float]
    fills: Mapping[str, int]
    crosses_documents = True

    def __init__(
        self,
        special: SpecialTokens,
        config: ReplacedTokenObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.masking = Masking.of(config, special)
        self.cls, self.sep = special.need("cls", config.name), special.need("sep", config.name)
        self.weights = {"generator": 1.0, "discriminator": config.discriminator_weight}
        self.fills = {"original": special.pad}
        self.max_tokens = longest(lambda n: n + 2, row_lengths[:1], config.name)

    def lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build(self, piece: Piece, key: PieceKey) -> Fields:
        tokens = piece.tokens
        shown, targets = self.masking(tokens, key_of(key, "replaced_token"))
        fields = single(shown, targets, self.cls, self.sep)
        original = fields["tokens"].copy()
        original[1:-1] = tokens
        return fields | {"original": original}

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        documents = batch.get("documents")
        counted = (
            batch["original"] if documents is None else documents
        )  # where a row is one document, all are counted
        return {"generator": (batch["targets"] != IGNORE).sum(), "discriminator": (counted >= 0).sum()}
