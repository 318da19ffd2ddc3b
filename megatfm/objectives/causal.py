"""Next-token prediction, also of several tokens ahead, for decoders and for encoder-decoders."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import CausalObjective, ModelConfig
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.registry import (
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    TokenArray,
)
from megatfm.objectives.two_sides import seq2seq_example
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.targets import shifted_targets


class Causal(Objective):
    """Each document is read as [BOS, d…] and predicts [d…, EOS], so every token counts exactly once an epoch.

    With `model.n_mtp_heads` = n there are the terms future_1 … future_n: at each place the token that comes so many
    further on in the same document (Gloeckle et al. 2024).
    """

    model_families = ("decoder",)
    predicts_tokens = True
    likelihood_term = "causal"
    allows_cross_document_attention = True

    def __init__(
        self,
        special: SpecialTokens,
        config: CausalObjective | None = None,
        model: ModelConfig | None = None,
        row_lengths: tuple[int, ...] = (),
    ) -> None:
        self.special = special
        self.future = range(1, 1 + (model.n_mtp_heads if model else 0))
        weight = config.mtp_loss_weight if config else 1.0
        self.loss_weights: Mapping[str, float] = {"causal": 1.0} | {
            f"future_{n}": weight for n in self.future
        }

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return n_tokens + 1

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        framed = np.empty(len(tokens) + 2, np.int64)
        framed[0], framed[1:-1], framed[-1] = self.special.bos, tokens, self.special.eos
        return {"tokens": framed[:-1], "targets": framed[1:]}

    def build_many(self, documents: Sequence[TokenArray]) -> Example:
        """`build` of many documents, one after another, in their own type."""
        added = np.min_scalar_type(max(self.special.bos, self.special.eos))
        stored = np.result_type(*{document.dtype for document in documents}, added)
        bos = np.array([self.special.bos], stored)
        tokens = np.concatenate([part for document in documents for part in (bos, document)])
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[np.cumsum([len(document) + 1 for document in documents]) - 1] = self.special.eos
        return {"tokens": tokens, "targets": targets}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        targets, documents = batch["targets"], batch.get("documents")
        ahead = {f"future_{n}": (shifted_targets(targets, documents, n) != IGNORE).sum() for n in self.future}
        return {"causal": (targets != IGNORE).sum()} | ahead


class EncoderDecoderCausal(Objective):
    """A text from its first token on by an encoder-decoder, whose encoder reads only EOS (Raffel et al. 2020, 3.2)."""

    model_families = ("encoder_decoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]
    field_prefixes = ENCODER_DECODER
    likelihood_term = "span"

    def __init__(
        self,
        special: SpecialTokens,
        config: CausalObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.loss_weights = special, {"span": 1.0}
        self.max_tokens = max(row_lengths[-1] - 1, 1)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.stack([np.ones_like(n_tokens), n_tokens + 1], axis=1)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        return seq2seq_example(np.zeros(0, np.int64), piece.tokens, self.special)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"span": (batch["targets"] != IGNORE).sum()}


@OBJECTIVES.register("causal")
def causal(
    special: SpecialTokens, config: CausalObjective, model: ModelConfig, row_lengths: tuple[int, ...]
) -> Objective:
    """Next-token prediction, as the model's family does it."""
    chosen = EncoderDecoderCausal if model.family == "encoder_decoder" else Causal
    return chosen(special, config, model, row_lengths)
