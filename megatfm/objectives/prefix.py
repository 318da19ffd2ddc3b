"""Prefix language modelling (Liu et al. 2018; Raffel et al. 2020, 3.2.1): the rest of a text after its start."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, PrefixObjective
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import randint_below
from megatfm.objectives.registry import (
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    max_piece_tokens,
)
from megatfm.objectives.two_sides import prefix_lm_example, seq2seq_example
from megatfm.ops.cross_entropy import IGNORE


class PrefixLM(Objective):
    """[BOS, d…] → [d…, EOS] by a decoder; BOS and a uniform number of tokens, 0 to all, are the prefix that all see."""

    model_families = ("decoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: PrefixObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.loss_weights = special, {"causal": 1.0}
        self.max_tokens = max_piece_tokens(lambda n: n + 1, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 1, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        cut = randint_below(len(tokens) + 1, keyed.uniform(1, *key, "prefix"))[0]
        return prefix_lm_example(np.append(self.special.bos, tokens[:cut]), tokens[cut:], self.special)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"causal": (batch["targets"] != IGNORE).sum()}


class PrefixSeq2Seq(Objective):
    """The start of a text for the encoder, the rest for the decoder, each of at least one token and with EOS.

    The cut is uniform among those with which both sides fit their rows, and the same in every epoch, since it decides
    the lengths. A piece is no longer than the longer row, so that a good part of all cuts fits.
    """

    model_families = ("encoder_decoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]
    field_prefixes = ENCODER_DECODER

    def __init__(
        self,
        special: SpecialTokens,
        config: PrefixObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.loss_weights = special, {"span": 1.0}
        self.most_given, self.most_wanted = max(row_lengths[0] - 1, 1), max(row_lengths[-1] - 1, 1)
        self.max_tokens = max_piece_tokens(
            lambda n: np.where(n > 1, np.maximum(n, 2), 0),
            [max(self.most_given, self.most_wanted)],
            config.name,
        )

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        cuts = self._cuts(n_tokens, keys)
        return np.where(n_tokens[:, None] > 1, np.stack([cuts + 1, n_tokens - cuts + 1], axis=1), 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        cut = int(self._cuts(np.array([len(tokens)]), key.without_epoch)[0])
        return seq2seq_example(tokens[:cut], tokens[cut:], self.special)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"span": (batch["targets"] != IGNORE).sum()}

    def _cuts(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        least = np.maximum(n_tokens - self.most_wanted, 1)
        most = np.minimum(n_tokens - 1, self.most_given)
        return least + randint_below(np.maximum(most - least + 1, 1), keyed.to_unit_interval(keys))


@OBJECTIVES.register("prefix")
def prefix(
    special: SpecialTokens, config: PrefixObjective, model: ModelConfig, row_lengths: tuple[int, ...]
) -> Objective:
    """A prefix, as the model's family reads it."""
    chosen = PrefixSeq2Seq if model.family == "encoder_decoder" else PrefixLM
    return chosen(special, config, model, row_lengths)
