"""Span corruption (Raffel et al. 2020, section 3.1.4): sentinels stand for spans, which are to be predicted."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, SpanCorruptionObjective
from megatfm.data import DocumentChunk
from megatfm.errors import UsageError
from megatfm.keyed import PieceKey
from megatfm.objectives.registry import (
    DECODER_ONLY,
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    TokenArray,
    max_piece_tokens,
)
from megatfm.objectives.two_sides import prefix_lm_example, seq2seq_example
from megatfm.ops.cross_entropy import IGNORE

Ints = NDArray[np.int64]


@OBJECTIVES.register("span_corruption")
class SpanCorruption(Objective):
    """T5's objective: input [x…, sentinel₀, x…, sentinel₁, …, EOS], target [sentinel₀, span₀, sentinel₁, …, EOS].

    A prefix decoder reads the input without its EOS as the prefix, and goes on with the target.
    """

    model_families = ("encoder_decoder", "decoder")
    predicts_tokens = True
    loss_weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: SpanCorruptionObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.config = special, config
        self.is_encoder_decoder = model.family == "encoder_decoder"
        self.field_prefixes = ENCODER_DECODER if self.is_encoder_decoder else DECODER_ONLY
        self.loss_weights = {"span" if self.is_encoder_decoder else "causal": 1.0}
        self.max_tokens = max_piece_tokens(
            self._lengths, row_lengths[: len(self.field_prefixes)], config.name
        )
        most = int(
            count_noise_spans(
                np.arange(2, self.max_tokens + 1), config.noise_density, config.mean_noise_span_length
            )[1].max(initial=0)
        )
        require_sentinels(special, most, config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return self._lengths(n_tokens)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        inputs, target_tokens = corrupt_spans(
            piece.tokens,
            self.config.noise_density,
            self.config.mean_noise_span_length,
            self.special.sentinels,
            (*key, "span_corruption"),
        )
        return (seq2seq_example if self.is_encoder_decoder else prefix_lm_example)(
            inputs, target_tokens, self.special
        )

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {term: (batch["targets"] != IGNORE).sum() for term in self.loss_weights}

    def _lengths(self, n_tokens: Ints) -> Ints:
        return corrupted_lengths(
            n_tokens, self.config.noise_density, self.config.mean_noise_span_length, self.is_encoder_decoder
        )


def count_noise_spans(n_tokens: Ints, rate: float, mean_span: float) -> tuple[Ints, Ints]:
    """How many tokens and spans are taken out of pieces of `n_tokens` ≥ 2, each [n].

    As in T5's code: both are rounded, half to even, neither is 0, and of the tokens one is left. (There, more spans
    than remaining tokens would break the segmentation; here there are at most as many.)
    """
    noise = np.clip(np.round(n_tokens * rate), 1, n_tokens - 1).astype(np.int64)
    spans = np.clip(np.round(noise / mean_span), 1, n_tokens - noise).astype(np.int64)
    return noise, spans


def corrupted_lengths(n_tokens: Ints, rate: float, mean_span: float, two_sides: bool) -> Ints:
    """Lengths of the input and the target, both with EOS [n, 2], or joined for a prefix decoder [n, 1]; 0 for fewer
    than two tokens."""
    noise, spans = count_noise_spans(np.maximum(n_tokens, 2), rate, mean_span)
    inputs, target_tokens = n_tokens - noise + spans, noise + spans
    both = [inputs + 1, target_tokens + 1] if two_sides else [inputs + target_tokens]
    return np.where(n_tokens[:, None] >= 2, np.stack(both, axis=1), 0)


def corrupt_spans(
    tokens: TokenArray, rate: float, mean_span: float, sentinels: Sequence[int], key: tuple[int | str, ...]
) -> tuple[Ints, Ints]:
    """Input and target of a piece, without EOS.

    Spans of tokens that stay and that go take turns, a staying one first; the lengths of each kind are a uniform
    composition of their number (T5's `random_spans_noise_mask`).
    """
    (noise,), (spans,) = count_noise_spans(np.array([len(tokens)]), rate, mean_span)
    stays = len(tokens) - noise
    random = keyed.random_uint64(int(noise + stays), *key)
    lengths = np.empty(2 * spans, np.int64)
    lengths[0::2] = segments(int(stays), int(spans), random[: stays - 1])
    lengths[1::2] = segments(int(noise), int(spans), random[stays:])
    goes = np.repeat(np.arange(2 * spans) % 2 == 1, lengths)
    marks = np.array(sentinels[:spans], np.int64)
    ids = tokens.astype(np.int64)
    inputs = np.insert(ids[~goes], np.cumsum(lengths[0::2]), marks)
    target_tokens = np.insert(ids[goes], np.cumsum(lengths[1::2]) - lengths[1::2], marks)
    return inputs, target_tokens


def segments(random_segmentation: int, n_segments: int, random: NDArray[np.uint64]) -> Ints:
    """Lengths ≥ 1 [n_segments] of a uniformly drawn cut of `n_items`, from at least n_items − 1 random numbers."""
    cuts = np.sort(np.argsort(random[: random_segmentation - 1], kind="stable")[: n_segments - 1]) + 1
    return np.diff(cuts, prepend=0, append=random_segmentation)


def require_sentinels(special: SpecialTokens, n: int, objective: str) -> None:
    """Raise UsageError unless the tokenizer has `n` sentinels."""
    if len(special.sentinels) < n:
        raise UsageError(
            f"objective.name = {objective!r} marks up to {n} spans in such rows, but the tokenizer has "
            f"{len(special.sentinels)} sentinels: prepare the corpus with tokenizer.sentinels={n}, or set a shorter "
            "data.sequence_length"
        )
