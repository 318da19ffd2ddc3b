"""Denoising for encoder-decoders and prefix decoders: T5's span corruption and UL2's mixture of denoisers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm import rng
from megatfm.config import ModelConfig, SpanCorruptionObjective, UL2Objective
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.objectives.base import (
    DECODER_ONLY,
    ENCODER_DECODER,
    OBJECTIVES,
    Example,
    Ints,
    Objective,
    SpecialTokens,
    TokenArray,
    max_piece_tokens,
    prefix_lm_example,
    randint_below,
    seq2seq_example,
)
from megatfm.rng import PieceKey


@OBJECTIVES.register("span_corruption")
class SpanCorruption(Objective):
    """T5's objective (Raffel et al. 2020, section 3.1.4): input [x…, sentinel₀, x…, sentinel₁, …, EOS], target
    [sentinel₀, span₀, sentinel₁, …, EOS].

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
        _, n_spans = count_noise_spans(
            np.arange(2, self.max_tokens + 1), config.noise_density, config.mean_noise_span_length
        )
        require_sentinels(special, int(n_spans.max(initial=0)), config.name)

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

    def _lengths(self, n_tokens: Ints) -> Ints:
        return corrupted_lengths(
            n_tokens, self.config.noise_density, self.config.mean_noise_span_length, self.is_encoder_decoder
        )


def count_noise_spans(n_tokens: Ints, rate: float, mean_span: float) -> tuple[Ints, Ints]:
    """Count the tokens and spans that are taken out of pieces of `n_tokens` ≥ 2, each [n].

    As in T5's code: both are rounded, half to even, neither is 0, and of the tokens one is left. (There, more spans
    than remaining tokens would break the segmentation; here there are at most as many.)
    """
    noise = np.clip(np.round(n_tokens * rate), 1, n_tokens - 1).astype(np.int64)
    spans = np.clip(np.round(noise / mean_span), 1, n_tokens - noise).astype(np.int64)
    return noise, spans


def corrupted_lengths(n_tokens: Ints, rate: float, mean_span: float, two_sides: bool) -> Ints:
    """Return the lengths of the input and the target, both with EOS [n, 2], or joined for a prefix decoder [n, 1]; 0
    for pieces of fewer than two tokens."""
    noise, spans = count_noise_spans(np.maximum(n_tokens, 2), rate, mean_span)
    inputs, target_tokens = n_tokens - noise + spans, noise + spans
    lengths = [inputs + 1, target_tokens + 1] if two_sides else [inputs + target_tokens]
    return np.where(n_tokens[:, None] >= 2, np.stack(lengths, axis=1), 0)


def corrupt_spans(
    tokens: TokenArray, rate: float, mean_span: float, sentinels: Sequence[int], key: tuple[int | str, ...]
) -> tuple[Ints, Ints]:
    """Return input and target of a piece, without EOS.

    Spans of tokens that stay and that go take turns, a staying one first; the lengths of each kind are a uniform
    composition of their number (T5's `random_spans_noise_mask`).
    """
    (noise,), (spans,) = count_noise_spans(np.array([len(tokens)]), rate, mean_span)
    stays = len(tokens) - noise
    random = rng.random_uint64(int(noise + stays), *key)
    lengths = np.empty(2 * spans, np.int64)
    lengths[0::2] = random_segmentation(int(stays), int(spans), random[: stays - 1])
    lengths[1::2] = random_segmentation(int(noise), int(spans), random[stays:])
    is_noise = np.repeat(np.arange(2 * spans) % 2 == 1, lengths)
    marks = np.array(sentinels[:spans], np.int64)
    ids = tokens.astype(np.int64)
    inputs = np.insert(ids[~is_noise], np.cumsum(lengths[0::2]), marks)
    target_tokens = np.insert(ids[is_noise], np.cumsum(lengths[1::2]) - lengths[1::2], marks)
    return inputs, target_tokens


def random_segmentation(n_items: int, n_segments: int, random: NDArray[np.uint64]) -> Ints:
    """Return the lengths ≥ 1 [n_segments] of a uniformly drawn cut of `n_items`, by n_items − 1 random numbers."""
    cuts = np.sort(np.argsort(random[: n_items - 1], kind="stable")[: n_segments - 1]) + 1
    return np.diff(cuts, prepend=0, append=n_items)


def require_sentinels(special: SpecialTokens, n: int, objective: str) -> None:
    """Raise UsageError unless the tokenizer has `n` sentinels."""
    if len(special.sentinels) < n:
        raise UsageError(
            f"objective.name = {objective!r} marks up to {n} spans in such rows, but the tokenizer has "
            f"{len(special.sentinels)} sentinels: prepare the corpus with tokenizer.sentinels={n}, or set a shorter "
            "data.sequence_length"
        )


class Denoiser(NamedTuple):
    """A denoiser of the mixture: mode, and for span corruption the mean length of a span and the share of tokens."""

    mode: str
    mean_span: float
    rate: float


DENOISERS = (
    Denoiser("R", 3.0, 0.15),
    Denoiser("R", 8.0, 0.15),
    Denoiser("X", 3.0, 0.5),
    Denoiser("X", 8.0, 0.5),
    Denoiser("X", 64.0, 0.15),
    Denoiser("X", 64.0, 0.5),
    Denoiser("S", 0.0, 0.25),
)
"""R: (μ=3, r=.15), (μ=8, r=.15). X: (3, .5), (8, .5), (64, .15), (64, .5). S: (L/4, .25), one span at the end."""


@OBJECTIVES.register("ul2")
class Denoisers(Objective):
    """UL2's mixture of denoisers (Tay et al. 2023, section 3.1): each piece goes through one of seven. R and X are span
    corruptions, S predicts the end of the text, of uniform length up to half of it, without sentinels.

    Where the tokenizer has mode tokens, that of the denoiser comes first. A prefix decoder reads the input as its
    prefix, after BOS if there is no mode token. Which denoiser it is decides the length, so that it is the same in
    every epoch.
    """

    model_families = ("encoder_decoder", "decoder")
    predicts_tokens = True
    loss_weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: UL2Objective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.is_encoder_decoder = special, model.family == "encoder_decoder"
        self.field_prefixes = ENCODER_DECODER if self.is_encoder_decoder else DECODER_ONLY
        self.loss_weights = {"span" if self.is_encoder_decoder else "causal": 1.0}
        self.mode_token = {
            mode: special.modes.get(mode, None if self.is_encoder_decoder else special.bos) for mode in "RSX"
        }
        shares = {
            "R": config.r_denoiser_weight / 2,
            "X": config.x_denoiser_weight / 4,
            "S": config.s_denoiser_weight,
        }
        weights = np.array([shares[denoiser.mode] for denoiser in DENOISERS])
        self.cumulative_probs = np.cumsum(weights / weights.sum())
        used = [d for d in range(len(DENOISERS)) if weights[d] > 0]
        rows = row_lengths[: len(self.field_prefixes)]
        self.max_tokens = min(max_piece_tokens(partial(self.max_lengths, d), rows, config.name) for d in used)
        n_tokens = np.arange(2, self.max_tokens + 1)
        spans = [
            count_noise_spans(n_tokens, d.rate, d.mean_span)[1].max(initial=0)
            for d in DENOISERS
            if d.mode != "S"
        ]
        require_sentinels(special, int(max(n for d, n in enumerate([*spans, 0]) if d in used)), config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        denoisers, cuts = self.choose_denoisers(n_tokens, keys)
        lengths = np.zeros((len(n_tokens), len(self.field_prefixes)), np.int64)
        for number in range(len(DENOISERS)):
            is_chosen = denoisers == number
            lengths[is_chosen] = self.denoiser_lengths(number, n_tokens[is_chosen], cuts[is_chosen])
        return lengths

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        (number,), (cut,) = self.choose_denoisers(np.array([len(tokens)]), key.without_epoch)
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            inputs, target_tokens = tokens[:cut], tokens[cut:]
        else:
            inputs, target_tokens = corrupt_spans(
                tokens, rate, mean_span, self.special.sentinels, (*key, "denoisers")
            )
        first = self.mode_token[mode]
        if first is not None:
            inputs = np.append(first, inputs)
        return (seq2seq_example if self.is_encoder_decoder else prefix_lm_example)(
            inputs, target_tokens, self.special
        )

    def choose_denoisers(self, n_tokens: Ints, keys: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """Return the denoiser of each piece, and where the sequential one would cut it."""
        first, second = (rng.to_unit_interval(rng.hash_rows((name,), keys)) for name in ("denoiser", "cut"))
        denoisers = np.searchsorted(self.cumulative_probs, first, side="right").astype(np.int64)
        n_targets = 1 + randint_below(np.maximum(n_tokens // 2, 1), second)
        return denoisers, np.maximum(n_tokens - n_targets, 0)

    def denoiser_lengths(self, number: int, n_tokens: Ints, cuts: Ints) -> Ints:
        """Return the lengths of sequences that denoiser `number` makes of texts, [texts, 1 or 2]."""
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            side_lengths = [cuts + 1, n_tokens - cuts + 1] if self.is_encoder_decoder else [n_tokens]
            lengths = np.where(n_tokens[:, None] >= 2, np.stack(side_lengths, axis=1), 0)
        else:
            lengths = corrupted_lengths(n_tokens, rate, mean_span, self.is_encoder_decoder)
        if self.mode_token[mode] is not None:
            lengths[:, 0] += lengths[:, 0] > 0
        return lengths

    def max_lengths(self, number: int, n_tokens: Ints) -> Ints:
        """Return the most that each side may need: the sequential denoiser cuts anywhere in the second half."""
        late, middle = n_tokens - 1, n_tokens - n_tokens // 2
        return np.maximum(
            self.denoiser_lengths(number, n_tokens, late), self.denoiser_lengths(number, n_tokens, middle)
        )
