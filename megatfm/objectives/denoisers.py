"""UL2's mixture of denoisers (Tay et al. 2023, section 3.1)."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, UL2Objective
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import randint_below
from megatfm.objectives.registry import (
    DECODER_ONLY,
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    max_piece_tokens,
)
from megatfm.objectives.span_corruption import (
    corrupt_spans,
    corrupted_lengths,
    count_noise_spans,
    require_sentinels,
)
from megatfm.objectives.two_sides import prefix_lm_example, seq2seq_example
from megatfm.ops.cross_entropy import IGNORE

Ints = NDArray[np.int64]


class Denoiser(NamedTuple):
    """One of the mixture: its mode, and for span corruption the mean length of a span and the share of tokens."""

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
    """Each piece goes through one of seven denoisers: R and X are span corruptions, S predicts the end of the text, of
    uniform length up to half of it, without sentinels.

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
        chosen, cuts = self.choose_denoisers(n_tokens, keys)
        found = np.zeros((len(n_tokens), len(self.field_prefixes)), np.int64)
        for number in range(len(DENOISERS)):
            mine = chosen == number
            found[mine] = self.denoiser_lengths(number, n_tokens[mine], cuts[mine])
        return found

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        (number,), (cut,) = self.choose_denoisers(np.array([len(tokens)]), key.without_epoch)
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            given, wanted = tokens[:cut], tokens[cut:]
        else:
            given, wanted = corrupt_spans(
                tokens, rate, mean_span, self.special.sentinels, (*key, "denoisers")
            )
        first = self.mode_token[mode]
        if first is not None:
            given = np.append(first, given)
        return (seq2seq_example if self.is_encoder_decoder else prefix_lm_example)(
            given, wanted, self.special
        )

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {term: (batch["targets"] != IGNORE).sum() for term in self.loss_weights}

    def choose_denoisers(self, n_tokens: Ints, keys: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """The denoiser of each piece, and where the sequential one would cut it."""
        first, second = (
            keyed.to_unit_interval(keyed.hash_rows((name,), keys)) for name in ("denoiser", "cut")
        )
        chosen = np.searchsorted(self.cumulative_probs, first, side="right").astype(np.int64)
        wanted = 1 + randint_below(np.maximum(n_tokens // 2, 1), second)
        return chosen, np.maximum(n_tokens - wanted, 0)

    def denoiser_lengths(self, number: int, n_tokens: Ints, cuts: Ints) -> Ints:
        """Return the lengths of sequences that denoiser `number` makes of texts, [texts, 1 or 2]."""
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            both = [cuts + 1, n_tokens - cuts + 1] if self.is_encoder_decoder else [n_tokens]
            lengths = np.where(n_tokens[:, None] >= 2, np.stack(both, axis=1), 0)
        else:
            lengths = corrupted_lengths(n_tokens, rate, mean_span, self.is_encoder_decoder)
        if self.mode_token[mode] is not None:
            lengths[:, 0] += lengths[:, 0] > 0
        return lengths

    def max_lengths(self, number: int, n_tokens: Ints) -> Ints:
        """The most that each side may need: the sequential denoiser cuts anywhere in the second half."""
        late, middle = n_tokens - 1, n_tokens - n_tokens // 2
        return np.maximum(
            self.denoiser_lengths(number, n_tokens, late), self.denoiser_lengths(number, n_tokens, middle)
        )
