"""UL2's mixture of denoisers (Tay et al. 2023, section 3.1)."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import DenoisersObjective, ModelConfig
from megatfm.data import Piece
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import below
from megatfm.objectives.registry import (
    OBJECTIVES,
    ONE_SIDE,
    TWO_SIDES,
    Batch,
    Fields,
    Objective,
    SpecialTokens,
    longest,
)
from megatfm.objectives.span_corruption import corrupt, corrupted_lengths, need_sentinels, span_counts
from megatfm.objectives.two_sides import pair, prefixed
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


@OBJECTIVES.register("denoisers")
class Denoisers(Objective):
    """Each piece goes through one of seven denoisers: R and X are span corruptions, S predicts the end of the text, of
    uniform length up to half of it, without sentinels.

    Where the tokenizer has mode tokens, that of the denoiser comes first. A prefix decoder reads the input as its
    prefix, after BOS if there is no mode token. Which denoiser it is decides the length, so that it is the same in
    every epoch.
    """

    families = ("encoder_decoder", "decoder")
    predicts_tokens = True
    weights: Mapping[str, float]

    def __init__(
        self,
        special: SpecialTokens,
        config: DenoisersObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.special, self.two = special, model.family == "encoder_decoder"
        self.sides = TWO_SIDES if self.two else ONE_SIDE
        self.weights = {"span" if self.two else "causal": 1.0}
        self.first = {mode: special.modes.get(mode, None if self.two else special.bos) for mode in "RSX"}
        shares = {"R": config.regular / 2, "X": config.extreme / 4, "S": config.sequential}
        weights = np.array([shares[denoiser.mode] for denoiser in DENOISERS])
        self.up_to = np.cumsum(weights / weights.sum())
        used = [d for d in range(len(DENOISERS)) if weights[d] > 0]
        rows = row_lengths[: len(self.sides)]
        self.max_tokens = min(longest(partial(self._longest_of, d), rows, config.name) for d in used)
        n_tokens = np.arange(2, self.max_tokens + 1)
        spans = [
            span_counts(n_tokens, d.rate, d.mean_span)[1].max(initial=0) for d in DENOISERS if d.mode != "S"
        ]
        need_sentinels(special, int(max(n for d, n in enumerate([*spans, 0]) if d in used)), config.name)

    def lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        chosen, cuts = self._choices(n_tokens, keys)
        found = np.zeros((len(n_tokens), len(self.sides)), np.int64)
        for number in range(len(DENOISERS)):
            mine = chosen == number
            found[mine] = self._lengths_of(number, n_tokens[mine], cuts[mine])
        return found

    def build(self, piece: Piece, key: PieceKey) -> Fields:
        tokens = piece.tokens
        (number,), (cut,) = self._choices(np.array([len(tokens)]), key.planned)
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            given, wanted = tokens[:cut], tokens[cut:]
        else:
            given, wanted = corrupt(tokens, rate, mean_span, self.special.sentinels, (*key, "denoisers"))
        first = self.first[mode]
        if first is not None:
            given = np.append(first, given)
        return (pair if self.two else prefixed)(given, wanted, self.special)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {term: (batch["targets"] != IGNORE).sum() for term in self.weights}

    def _choices(self, n_tokens: Ints, keys: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """The denoiser of each piece, and where the sequential one would cut it."""
        first, second = (keyed.fractions(keyed.hashes((name,), keys)) for name in ("denoiser", "cut"))
        chosen = np.searchsorted(self.up_to, first, side="right").astype(np.int64)
        wanted = 1 + below(np.maximum(n_tokens // 2, 1), second)
        return chosen, np.maximum(n_tokens - wanted, 0)

    def _lengths_of(self, number: int, n_tokens: Ints, cuts: Ints) -> Ints:
        mode, mean_span, rate = DENOISERS[number]
        if mode == "S":
            both = [cuts + 1, n_tokens - cuts + 1] if self.two else [n_tokens]
            lengths = np.where(n_tokens[:, None] >= 2, np.stack(both, axis=1), 0)
        else:
            lengths = corrupted_lengths(n_tokens, rate, mean_span, self.two)
        if self.first[mode] is not None:
            lengths[:, 0] += lengths[:, 0] > 0
        return lengths

    def _longest_of(self, number: int, n_tokens: Ints) -> Ints:
        """The most that each side may need: the sequential denoiser cuts anywhere in the second half."""
        late, middle = n_tokens - 1, n_tokens - n_tokens // 2
        return np.maximum(
            self._lengths_of(number, n_tokens, late), self._lengths_of(number, n_tokens, middle)
        )
