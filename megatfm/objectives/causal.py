"""Left to right: next-token prediction (also several tokens ahead) and prefix language modelling.

Both for decoders and encoder-decoders.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import CausalObjective, ModelConfig, PrefixObjective
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives.base import (
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
    TokenArray,
    find_max_chunk_tokens,
    make_prefix_lm_example,
    make_seq2seq_example,
    randint_below,
)
from megatfm.ops.cross_entropy import IGNORE, shift_targets
from megatfm.rng import ChunkKey


class Causal(Objective):
    """Next-token prediction: a document [BOS, d…] predicts [d…, EOS], so every token counts once an epoch.

    `model.n_mtp_heads` = n adds terms future_1 … future_n: term k predicts the token k further on in the same document
    (Gloeckle et al. 2024).
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
        row_lengths: RowLengths = (),
    ) -> None:
        self.special = special
        self.future = range(1, 1 + (model.n_mtp_heads if model else 0))
        weight = config.mtp_loss_weight if config else 1.0
        self.loss_weights: Mapping[str, float] = {"causal": 1.0} | {f"future_{n}": weight for n in self.future}

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return n_tokens + 1

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        framed = np.empty(len(tokens) + 2, np.int64)
        framed[0], framed[1:-1], framed[-1] = self.special.bos, tokens, self.special.eos
        return {"tokens": framed[:-1], "targets": framed[1:]}

    def build_many(self, documents: Sequence[TokenArray]) -> Example:
        """Return the fields of `build_example` of many documents, concatenated [total], in a small dtype."""
        special_dtype = np.min_scalar_type(max(self.special.bos, self.special.eos))
        dtype = np.result_type(*{document.dtype for document in documents}, special_dtype)
        bos = np.array([self.special.bos], dtype)
        tokens = np.concatenate([tokens_or_bos for document in documents for tokens_or_bos in (bos, document)])
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[np.cumsum([len(document) + 1 for document in documents]) - 1] = self.special.eos
        return {"tokens": tokens, "targets": targets}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        targets, documents = batch["targets"], batch.get("documents")
        future_counts = {f"future_{n}": (shift_targets(targets, documents, n) != IGNORE).sum() for n in self.future}
        return {"causal": (targets != IGNORE).sum()} | future_counts


class EncoderDecoderCausal(Objective):
    """Next-token prediction by an encoder-decoder, whose encoder reads only EOS (Raffel et al. 2020, 3.2)."""

    model_families = ("encoder_decoder",)
    predicts_tokens = True
    field_prefixes = ENCODER_DECODER
    likelihood_term = "span"

    def __init__(
        self, special: SpecialTokens, config: CausalObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.special, self.loss_weights = special, {"span": 1.0}
        self.max_tokens = max(row_lengths[-1] - 1, 1)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.stack([np.ones_like(n_tokens), n_tokens + 1], axis=1)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        return make_seq2seq_example(np.zeros(0, np.int64), chunk.tokens, self.special)


@OBJECTIVES.register("causal")
def causal(special: SpecialTokens, config: CausalObjective, model: ModelConfig, row_lengths: RowLengths) -> Objective:
    """Return next-token prediction for the model's family."""
    objective_class = EncoderDecoderCausal if model.family == "encoder_decoder" else Causal
    return objective_class(special, config, model, row_lengths)


class PrefixLM(Objective):
    """Prefix language modelling by a decoder, [BOS, d…] → [d…, EOS] (Liu et al. 2018; Raffel et al. 2020, 3.2.1).

    BOS and a uniform number of tokens, 0 to all, are the prefix that all see.
    """

    model_families = ("decoder",)
    predicts_tokens = True

    def __init__(
        self, special: SpecialTokens, config: PrefixObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.special, self.loss_weights = special, {"causal": 1.0}
        self.max_tokens = find_max_chunk_tokens(lambda n: n + 1, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.where(n_tokens > 0, n_tokens + 1, 0)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        cut = randint_below(len(tokens) + 1, rng.uniform(1, *key, "prefix"))[0]
        return make_prefix_lm_example(np.append(self.special.bos, tokens[:cut]), tokens[cut:], self.special)


class PrefixSeq2Seq(Objective):
    """Prefix language modelling by an encoder-decoder: the encoder reads the start of a text, the decoder its end.

    Each has at least one token and EOS. The cut is uniform among those with which both sides fit their rows, and the
    same in every epoch, since it decides the lengths. Chunks are no longer than the longer row, so that many cuts fit.
    """

    model_families = ("encoder_decoder",)
    predicts_tokens = True
    field_prefixes = ENCODER_DECODER

    def __init__(
        self, special: SpecialTokens, config: PrefixObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.special, self.loss_weights = special, {"span": 1.0}
        self.max_inputs, self.max_targets = max(row_lengths[0] - 1, 1), max(row_lengths[-1] - 1, 1)
        max_side = max(self.max_inputs, self.max_targets)
        self.max_tokens = find_max_chunk_tokens(lambda n: np.where(n > 1, n, 0), [max_side], config.name)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        cuts = self._draw_cuts(n_tokens, keys)
        return np.where(n_tokens[:, None] > 1, np.stack([cuts + 1, n_tokens - cuts + 1], axis=1), 0)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        cut = int(self._draw_cuts(np.array([len(tokens)]), key.without_epoch)[0])
        return make_seq2seq_example(tokens[:cut], tokens[cut:], self.special)

    def _draw_cuts(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        min_prefix = np.maximum(n_tokens - self.max_targets, 1)
        max_prefix = np.minimum(n_tokens - 1, self.max_inputs)
        return min_prefix + randint_below(np.maximum(max_prefix - min_prefix + 1, 1), rng.to_unit_interval(keys))


@OBJECTIVES.register("prefix")
def prefix(special: SpecialTokens, config: PrefixObjective, model: ModelConfig, row_lengths: RowLengths) -> Objective:
    """Return prefix language modelling for the model's family."""
    objective_class = PrefixSeq2Seq if model.family == "encoder_decoder" else PrefixLM
    return objective_class(special, config, model, row_lengths)
