"""Permutation language modelling (Yang et al. 2019, sections 2.2, 2.3 and 3.1)."""

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import ModelConfig, PermutationObjective
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    FloatArray,
    IntArray,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
    find_max_chunk_tokens,
    make_masking_key,
    randint_below,
)
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey


@OBJECTIVES.register("permutation")
class Permutation(Objective):
    """Predict tokens of spans of A [SEP] B [SEP] [CLS] in a random order.

    A token is predicted from the tokens before it in that order, and from all tokens outside of spans. A span's length
    L is uniform from 1 to `max_span`. The span lies anywhere in a context of K · L tokens, K = `tokens_per_prediction`;
    contexts follow one another. The first context begins before the text, so that every token is predicted with
    probability 1 / K; parts of spans outside of the text are dropped.

    `order` is 0 for tokens that are not predicted (special ones too), and counts from 1 for targets. A and B are a
    chunk cut at a uniform position. Their segments are 0 and 1, and [CLS] has segment 2, as in the released code.
    """

    model_families = ("xlnet",)
    predicts_tokens = True

    def __init__(
        self, special: SpecialTokens, config: PermutationObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.config = config
        self.cls, self.sep = special.require_frame(config.name)
        self.loss_weights = {"permutation": 1.0}
        self.max_tokens = find_max_chunk_tokens(lambda n: n + 3, row_lengths[:1], config.name)
        # The text's start falls into a context with a probability proportional to its length.
        self.cumulative_probs = np.cumsum(np.arange(1, config.max_span + 1)) / np.arange(1, config.max_span + 1).sum()

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.where(n_tokens > 1, n_tokens + 3, 0)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        n = len(tokens)
        n_contexts = n // self.config.tokens_per_prediction + 2
        random = rng.uniform(2 * n_contexts + 2 + n, *make_masking_key(key, "permutation"))
        predicted_indices = self.choose_tokens(n, random[2 : 2 * n_contexts + 2], float(random[0]))
        cut = 1 + int(randint_below(n - 1, float(random[1])))
        # The first [SEP] shifts the tokens of B by one.
        positions = np.arange(n) + (np.arange(n) >= cut)
        fields: Example = {name: np.zeros(n + 3, np.int64) for name in ("tokens", "order", "segments")}
        fields["targets"] = np.full(n + 3, IGNORE, np.int64)
        fields["tokens"][positions] = tokens
        fields["tokens"][[cut, n + 1, n + 2]] = self.sep, self.sep, self.cls
        fields["targets"][positions[predicted_indices]] = tokens[predicted_indices]
        order = np.argsort(random[2 * n_contexts + 2 :][: len(predicted_indices)], kind="stable")
        fields["order"][positions[predicted_indices[order]]] = 1 + np.arange(len(order))
        fields["segments"][cut + 1 :] = 1
        fields["segments"][-1] = 2
        return fields

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of the content stream and the queries of predicted tokens."""
        return super().n_tokens(batch) + (batch["targets"] != IGNORE).sum()

    def choose_tokens(self, n: int, random: FloatArray, start_uniform: float) -> IntArray:
        """Return the indices of the tokens in spans of a text of n tokens.

        random [2 · contexts] and start_uniform: uniform in [0, 1).
        """
        length_uniforms, offset_uniforms = np.split(random, 2)
        spans = 1 + randint_below(self.config.max_span, length_uniforms)
        spans[0] = 1 + np.searchsorted(self.cumulative_probs, length_uniforms[0], side="right")
        contexts = self.config.tokens_per_prediction * spans
        starts = np.cumsum(contexts) - contexts - randint_below(int(contexts[0]), start_uniform)
        firsts = starts + randint_below(contexts - spans + 1, offset_uniforms)
        indices = np.repeat(firsts - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
        return indices[(indices >= 0) & (indices < n)]
