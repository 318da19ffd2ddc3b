"""Replaced-token detection (ELECTRA: Clark et al. 2020)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import ModelConfig, ReplacedTokenObjective
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


@OBJECTIVES.register("replaced_token")
class ReplacedToken(Objective):
    """[CLS] text [SEP], masked in `tokens` and whole in `original`.

    The model's generator predicts the masked tokens and samples replacements, by `keys`; its discriminator tells for
    every token but padding whether it is the original one.
    """

    model_families = ("electra",)
    loss_weights: Mapping[str, float]
    padding_values: Mapping[str, int]
    allows_cross_document_attention = True

    def __init__(
        self,
        special: SpecialTokens,
        config: ReplacedTokenObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.masking = Masking.of(config, special)
        self.cls, self.sep = (
            special.require_token("cls", config.name),
            special.require_token("sep", config.name),
        )
        self.loss_weights = {"generator": 1.0, "discriminator": config.discriminator_weight}
        self.padding_values = {"original": special.pad}
        self.max_tokens = max_piece_tokens(lambda n: n + 2, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        shown, targets = self.masking(tokens, masking_key(key, "replaced_token"))
        fields = single_segment_example(shown, targets, self.cls, self.sep)
        original = fields["tokens"].copy()
        original[1:-1] = tokens
        return fields | {"original": original}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        documents = batch.get("documents")
        counted = (
            batch["original"] if documents is None else documents
        )  # where a row is one document, all are counted
        return {"generator": (batch["targets"] != IGNORE).sum(), "discriminator": (counted >= 0).sum()}
