"""Permutation language modelling (Yang et al. 2019, sections 2.2, 2.3 and 3.1)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import rng
from megatfm.config import ModelConfig, PermutationObjective
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    Floats,
    Ints,
    Objective,
    SpecialTokens,
    masking_key,
    max_piece_tokens,
    randint_below,
)
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import PieceKey


@OBJECTIVES.register("permutation")
class Permutation(Objective):
    """A [SEP] B [SEP] [CLS]; tokens of spans are predicted in a random order, each from those before it in that order
    and from all that is outside of spans.

    For each span a length L is drawn, uniform from 1 to `max_span`, and the span lies anywhere in a context of
    K · L tokens of its own; contexts follow one another. The first begins before the text, so that every token is as
    likely as any other, 1 / K; the part of a span outside of the text is left out.

    `order` is 0 for what is given (the marks too) and counts from 1 for targets. A and B are a piece cut at a uniform
    place; their segments are 0 and 1, and [CLS] has its own, as in the released code.
    """

    model_families = ("xlnet",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: PermutationObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.config = config
        self.cls, self.sep = special.require_frame(config.name)
        self.loss_weights = {"permutation": 1.0}
        self.max_tokens = max_piece_tokens(lambda n: n + 3, row_lengths[:1], config.name)
        # A context is met in the middle the more often the longer it is.
        self.cumulative_probs = (
            np.cumsum(np.arange(1, config.max_span + 1)) / np.arange(1, config.max_span + 1).sum()
        )

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 1, n_tokens + 3, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        n = len(tokens)
        contexts = n // self.config.tokens_per_prediction + 2
        random = rng.uniform(2 * contexts + 2 + n, *masking_key(key, "permutation"))
        chosen = self.choose_tokens(n, random[2 : 2 * contexts + 2], float(random[0]))
        cut = 1 + int(randint_below(n - 1, float(random[1])))
        # Numbers in the sequence: after the first mark, one more.
        at = np.arange(n) + (np.arange(n) >= cut)
        fields: Example = {name: np.zeros(n + 3, np.int64) for name in ("tokens", "order", "segments")}
        fields["targets"] = np.full(n + 3, IGNORE, np.int64)
        fields["tokens"][at] = tokens
        fields["tokens"][[cut, n + 1, n + 2]] = self.sep, self.sep, self.cls
        fields["targets"][at[chosen]] = tokens[chosen]
        ranks = np.argsort(
            np.argsort(random[2 * contexts + 2 :][: len(chosen)], kind="stable"), kind="stable"
        )
        fields["order"][at[chosen]] = 1 + ranks
        fields["segments"][cut + 1 :] = 1
        fields["segments"][-1] = 2
        return fields

    def n_tokens(self, batch: Batch) -> Tensor:
        """Tokens of the content, and queries of predicted tokens."""
        return super().n_tokens(batch) + (batch["targets"] != IGNORE).sum()

    def choose_tokens(self, n: int, random: Floats, u: float) -> Ints:
        """Numbers of the tokens in spans, in a text of n. random [2 × contexts], u: uniform in [0, 1)."""
        lengths_random, places_random = np.split(random, 2)
        spans = 1 + randint_below(self.config.max_span, lengths_random)
        spans[0] = 1 + np.searchsorted(self.cumulative_probs, lengths_random[0], side="right")
        contexts = self.config.tokens_per_prediction * spans
        starts = np.cumsum(contexts) - contexts - randint_below(int(contexts[0]), u)
        firsts = starts + randint_below(contexts - spans + 1, places_random)
        numbers = np.repeat(firsts - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
        return numbers[(numbers >= 0) & (numbers < n)]
