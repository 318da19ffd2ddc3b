"""Denoising for encoder-decoders and prefix decoders: T5's span corruption and UL2's mixture of denoisers."""

from collections.abc import Sequence
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
from megatfm.rng import ChunkKey


class Denoising(Objective):
    """Base: one sequence of both families from a corrupted input and what it is to predict."""

    model_families = ("encoder_decoder", "decoder")
    predicts_tokens = True

    def __init__(self, special: SpecialTokens, model: ModelConfig) -> None:
        self.special, self.is_encoder_decoder = special, model.family == "encoder_decoder"
        self.field_prefixes = ENCODER_DECODER if self.is_encoder_decoder else DECODER_ONLY
        self.loss_weights = {"span" if self.is_encoder_decoder else "causal": 1.0}

    def make_example(self, inputs: TokenArray, target_tokens: TokenArray) -> Example:
        """Return the fields of a sequence: inputs for the encoder, or as the prefix of a decoder."""
        make = make_seq2seq_example if self.is_encoder_decoder else make_prefix_lm_example
        return make(inputs, target_tokens, self.special)


@OBJECTIVES.register("span_corruption")
class SpanCorruption(Denoising):
    """T5's span corruption (Raffel et al. 2020, section 3.1.4).

    Input [x…, sentinel₀, x…, sentinel₁, …, EOS], target [sentinel₀, span₀, sentinel₁, …, EOS]. A prefix decoder reads
    the input without EOS as its prefix, and continues with the target.
    """

    def __init__(
        self, special: SpecialTokens, config: SpanCorruptionObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        super().__init__(special, model)
        self.config = config
        self.max_tokens = find_max_chunk_tokens(
            self._compute_lengths, row_lengths[: len(self.field_prefixes)], config.name
        )
        _, n_spans = count_noise_spans(
            np.arange(2, self.max_tokens + 1), config.noise_density, config.mean_noise_span_length
        )
        require_sentinels(special, int(n_spans.max(initial=0)), config.name)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return self._compute_lengths(n_tokens)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        inputs, target_tokens = corrupt_spans(
            chunk.tokens,
            self.config.noise_density,
            self.config.mean_noise_span_length,
            self.special.sentinels,
            (*key, "span_corruption"),
        )
        return self.make_example(inputs, target_tokens)

    def _compute_lengths(self, n_tokens: IntArray) -> IntArray:
        return compute_corrupted_lengths(
            n_tokens, self.config.noise_density, self.config.mean_noise_span_length, self.is_encoder_decoder
        )


def count_noise_spans(n_tokens: IntArray, noise_density: float, mean_span_length: float) -> tuple[IntArray, IntArray]:
    """Return the noise tokens and noise spans [n] of chunks of `n_tokens` [n] ≥ 2.

    Both are rounded half to even and at least 1, and at least one token is kept, as in T5's code. There are never more
    spans than kept tokens, unlike in T5's code: that would break the segmentation.
    """
    n_noise = np.clip(np.round(n_tokens * noise_density), 1, n_tokens - 1).astype(np.int64)
    n_spans = np.clip(np.round(n_noise / mean_span_length), 1, n_tokens - n_noise).astype(np.int64)
    return n_noise, n_spans


def compute_corrupted_lengths(
    n_tokens: IntArray, noise_density: float, mean_span_length: float, is_encoder_decoder: bool
) -> IntArray:
    """Return lengths of input and target with EOS [n, 2], or of both joined for a prefix decoder [n, 1].

    Chunks of fewer than two tokens have 0.
    """
    n_noise, n_spans = count_noise_spans(np.maximum(n_tokens, 2), noise_density, mean_span_length)
    inputs, target_tokens = n_tokens - n_noise + n_spans, n_noise + n_spans
    lengths = [inputs + 1, target_tokens + 1] if is_encoder_decoder else [inputs + target_tokens]
    return np.where(n_tokens[:, None] >= 2, np.stack(lengths, axis=1), 0)


def corrupt_spans(
    tokens: TokenArray,
    noise_density: float,
    mean_span_length: float,
    sentinels: Sequence[int],
    key: tuple[int | str, ...],
) -> tuple[IntArray, IntArray]:
    """Return a chunk's input and target without EOS.

    Kept and noise spans alternate, a kept one first. The lengths of each kind are a uniform composition of its tokens
    (T5's `random_spans_noise_mask`).
    """
    (n_noise,), (n_spans,) = count_noise_spans(np.array([len(tokens)]), noise_density, mean_span_length)
    n_kept = len(tokens) - n_noise
    random = rng.random_uint64(int(n_noise + n_kept), *key)
    lengths = np.empty(2 * n_spans, np.int64)
    lengths[0::2] = draw_segmentation(int(n_kept), int(n_spans), random[: n_kept - 1])
    lengths[1::2] = draw_segmentation(int(n_noise), int(n_spans), random[n_kept:])
    is_noise = np.repeat(np.arange(2 * n_spans) % 2 == 1, lengths)
    sentinel_ids = np.array(sentinels[:n_spans], np.int64)
    ids = tokens.astype(np.int64)
    inputs = np.insert(ids[~is_noise], np.cumsum(lengths[0::2]), sentinel_ids)
    target_tokens = np.insert(ids[is_noise], np.cumsum(lengths[1::2]) - lengths[1::2], sentinel_ids)
    return inputs, target_tokens


def draw_segmentation(n_items: int, n_segments: int, random: NDArray[np.uint64]) -> IntArray:
    """Return the lengths ≥ 1 [n_segments] of a uniform cut of `n_items`. random: at least n_items − 1 numbers."""
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
    """A denoiser of the mixture: mode R, X or S, mean length of noise spans in tokens, share of noise tokens."""

    mode: str
    mean_span_length: float
    noise_density: float


DENOISERS = (
    Denoiser("R", 3.0, 0.15),
    Denoiser("R", 8.0, 0.15),
    Denoiser("X", 3.0, 0.5),
    Denoiser("X", 8.0, 0.5),
    Denoiser("X", 64.0, 0.15),
    Denoiser("X", 64.0, 0.5),
    Denoiser("S", 0.0, 0.25),
)
"""The seven of the paper. S has one span at the end, of a quarter of the text on average."""


@OBJECTIVES.register("ul2")
class UL2(Denoising):
    """UL2's mixture of denoisers (Tay et al. 2023, section 3.1): one of seven for each chunk.

    R and X are span corruptions. S predicts the end of the text, of uniform length up to half of it, without sentinels.
    The denoiser's mode token comes first, if the tokenizer has mode tokens; else a prefix decoder's prefix begins with
    BOS. A chunk has the same denoiser in every epoch, since it decides the length.
    """

    def __init__(
        self, special: SpecialTokens, config: UL2Objective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        super().__init__(special, model)
        self.mode_token = {
            mode: special.modes.get(mode, None if self.is_encoder_decoder else special.bos) for mode in "RSX"
        }
        shares = {"R": config.r_denoiser_weight / 2, "X": config.x_denoiser_weight / 4, "S": config.s_denoiser_weight}
        weights = np.array([shares[denoiser.mode] for denoiser in DENOISERS])
        self.cumulative_probs = np.cumsum(weights / weights.sum())
        used = np.flatnonzero(weights > 0).tolist()
        rows = row_lengths[: len(self.field_prefixes)]
        self.max_tokens = min(
            find_max_chunk_tokens(partial(self.compute_max_lengths, denoiser), rows, config.name) for denoiser in used
        )
        n_tokens = np.arange(2, self.max_tokens + 1)
        max_spans = [
            count_noise_spans(n_tokens, denoiser.noise_density, denoiser.mean_span_length)[1].max(initial=0)
            for denoiser in (DENOISERS[index] for index in used)
            if denoiser.mode != "S"
        ]
        require_sentinels(special, int(max(max_spans, default=0)), config.name)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        denoisers, cuts = self.choose_denoisers(n_tokens, keys)
        lengths = np.zeros((len(n_tokens), len(self.field_prefixes)), np.int64)
        for denoiser in range(len(DENOISERS)):
            is_chosen = denoisers == denoiser
            lengths[is_chosen] = self.compute_denoiser_lengths(denoiser, n_tokens[is_chosen], cuts[is_chosen])
        return lengths

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        (denoiser,), (cut,) = self.choose_denoisers(np.array([len(tokens)]), key.without_epoch)
        mode, mean_span_length, noise_density = DENOISERS[denoiser]
        if mode == "S":
            inputs, target_tokens = tokens[:cut], tokens[cut:]
        else:
            inputs, target_tokens = corrupt_spans(
                tokens, noise_density, mean_span_length, self.special.sentinels, (*key, "denoisers")
            )
        mode_token = self.mode_token[mode]
        if mode_token is not None:
            inputs = np.append(mode_token, inputs)
        return self.make_example(inputs, target_tokens)

    def choose_denoisers(self, n_tokens: IntArray, keys: NDArray[np.uint64]) -> tuple[IntArray, IntArray]:
        """Return the index of each chunk's denoiser [n], and the cut [n] that denoiser S would make."""
        denoiser_uniform, cut_uniform = (
            rng.to_unit_interval(rng.hash_rows((name,), keys)) for name in ("denoiser", "cut")
        )
        denoisers = np.searchsorted(self.cumulative_probs, denoiser_uniform, side="right").astype(np.int64)
        n_targets = 1 + randint_below(np.maximum(n_tokens // 2, 1), cut_uniform)
        return denoisers, np.maximum(n_tokens - n_targets, 0)

    def compute_denoiser_lengths(self, denoiser: int, n_tokens: IntArray, cuts: IntArray) -> IntArray:
        """Return sequence lengths [n, sides] of chunks of `n_tokens` [n] under a denoiser. cuts [n]: of denoiser S."""
        mode, mean_span_length, noise_density = DENOISERS[denoiser]
        if mode == "S":
            side_lengths = [cuts + 1, n_tokens - cuts + 1] if self.is_encoder_decoder else [n_tokens]
            lengths = np.where(n_tokens[:, None] >= 2, np.stack(side_lengths, axis=1), 0)
        else:
            lengths = compute_corrupted_lengths(n_tokens, noise_density, mean_span_length, self.is_encoder_decoder)
        if self.mode_token[mode] is not None:
            lengths[:, 0] += lengths[:, 0] > 0
        return lengths

    def compute_max_lengths(self, denoiser: int, n_tokens: IntArray) -> IntArray:
        """Return the largest lengths [n, sides] of chunks. Denoiser S cuts anywhere in the second half."""
        last_cut, middle_cut = n_tokens - 1, n_tokens - n_tokens // 2
        return np.maximum(
            self.compute_denoiser_lengths(denoiser, n_tokens, last_cut),
            self.compute_denoiser_lengths(denoiser, n_tokens, middle_cut),
        )
