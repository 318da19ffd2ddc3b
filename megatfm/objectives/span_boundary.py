"""Masked spans of whole words, predicted from inside and from around them (SpanBERT: Joshi et al. 2020)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, SpanBoundaryObjective
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import Masking, masking_key, replace_masked, stochastic_round
from megatfm.objectives.registry import (
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    max_piece_tokens,
    require_head,
)
from megatfm.ops.cross_entropy import IGNORE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@OBJECTIVES.register("span_boundary")
class SpanBoundary(Objective):
    """[CLS] text [SEP]; tokens of masked spans are predicted, and once more from the tokens around their span.

    A piece of W words gets rate · W / μ spans, rounded up or down at random, of lengths drawn from the geometric
    distribution (its mean is μ words), at places drawn uniformly with a word or more between any two. So lengths
    and rate are the paper's, exactly in the mean; its code instead draws spans until the budget is spent and cuts the
    last. What replaces a span is drawn once for the whole of it.

    `span_left` and `span_right` are the distances from a masked token to the tokens before and after its span, else 0.
    """

    model_families = ("encoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: SpanBoundaryObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        require_head(model, "boundary", config.name)
        special.require_word_starts(f"objective.name = {config.name!r}")
        self.special, self.config = special, config
        self.masking = Masking(
            special,
            special.require_token("mask", config.name),
            config.mask_rate,
            config.mask_replace_prob,
            config.random_replace_prob,
        )
        self.cls, self.sep = (
            special.require_token("cls", config.name),
            special.require_token("sep", config.name),
        )
        self.loss_weights = {"masked": 1.0, "boundary": 1.0}
        self.max_tokens = max_piece_tokens(lambda n: n + 2, row_lengths[:1], config.name)
        shares = (1 - config.geometric_p) ** np.arange(config.max_span_words)
        self.cumulative_probs = np.cumsum(shares / shares.sum())
        self.mean = float(1 + (1 - self.cumulative_probs).sum())

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        n, starts = len(tokens), self.special.word_boundaries(tokens)
        random = keyed.uniform(2 * n + 2 * len(starts) + 1, *masking_key(key, "span_boundary"))
        begins, ends = self._spans(np.append(starts, n), random[2 * n :])
        sizes = ends - begins
        # Numbers in the sequence, whose first token is [CLS].
        at = 1 + np.arange(sizes.sum()) + np.repeat(begins - np.cumsum(sizes) + sizes, sizes)
        fields: Example = {name: np.zeros(n + 2, np.int64) for name in ("tokens", "span_left", "span_right")}
        fields["tokens"][0], fields["tokens"][1:-1], fields["tokens"][-1] = self.cls, tokens, self.sep
        fields["targets"] = np.full(n + 2, IGNORE, np.int64)
        original = fields["tokens"][at]
        fields["targets"][at] = original
        which = np.repeat(random[: len(sizes)], sizes)
        fields["tokens"][at] = replace_masked(original, which, random[n : n + len(at)], self.masking)
        fields["span_left"][at] = at - np.repeat(begins, sizes)
        fields["span_right"][at] = 1 + np.repeat(ends, sizes) - at
        return fields

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"masked": (batch["targets"] != IGNORE).sum(), "boundary": (batch["span_left"] > 0).sum()}

    def _spans(self, bounds: Ints, random: Floats) -> tuple[Ints, Ints]:
        """First tokens and ends [spans] of spans of the words that `bounds` [words + 1] cuts the tokens into."""
        n_words = len(bounds) - 1
        n_spans = stochastic_round(self.config.mask_rate * n_words / self.mean, float(random[-1]))
        words = 1 + np.searchsorted(self.cumulative_probs, random[:n_spans], side="right")
        # In a text of a few words, those at the end may find no room.
        words = words[np.cumsum(words + 1) <= n_words + 1].astype(np.int64)
        n_spans = len(words)
        free = n_words - int(words.sum()) - max(n_spans - 1, 0)
        # Spans and free words in random order: places of the spans are a uniform choice among them.
        places = np.sort(np.argsort(random[n_words : n_words + free + n_spans], kind="stable")[:n_spans])
        before = np.cumsum(words) - words
        first = places + before  # `places` counts for each earlier span one word, the one between the two
        return bounds[first], bounds[first + words]
