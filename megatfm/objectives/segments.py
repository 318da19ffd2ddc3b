"""Two segments and what holds between them: next-sentence prediction and sentence order, with masked tokens."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, NextSentenceObjective, SentenceOrderObjective
from megatfm.data import Piece
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import Masking, below, key_of
from megatfm.objectives.registry import (
    OBJECTIVES,
    Batch,
    Fields,
    Objective,
    SpecialTokens,
    Tokens,
    longest,
    need_model,
)
from megatfm.ops.cross_entropy import IGNORE

IS_NEXT, IS_RANDOM = 0, 1
IN_ORDER, SWAPPED = 0, 1


class Segments(Objective):
    """[CLS] A [SEP] B [SEP] with masked tokens, and at [CLS] a label in `sentence_targets`; what A and B are is left to
    the two objectives below. Where the model has segments, B and its mark are segment 1."""

    families = ("encoder",)
    predicts_tokens = True
    weights: Mapping[str, float]
    fills: Mapping[str, int]

    def __init__(
        self,
        special: SpecialTokens,
        config: NextSentenceObjective | SentenceOrderObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        need_model(model, "sentence", config.name)
        self.config, self.masking, self.has_segments = (
            config,
            Masking.of(config, special),
            model.embedding.n_segments > 1,
        )
        self.cls, self.sep = special.need("cls", config.name), special.need("sep", config.name)
        self.weights = {"masked": 1.0, "sentence": 1.0}
        self.fills = {"sentence_targets": IGNORE}
        self.max_tokens = longest(lambda n: n + 3, row_lengths[:1], config.name)

    def lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 1, n_tokens + 3, 0)

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"masked": "targets", "sentence": "sentence_targets"}
        return {term: (batch[field] != IGNORE).sum() for term, field in terms.items()}

    def joined(self, a: Tokens, b: Tokens, label: int, key: PieceKey) -> Fields:
        """The sequence of two segments; marks are never masked."""
        text = np.concatenate([a, b])
        shown, wanted = self.masking(text, key_of(key, self.config.name, self.config.static))
        n, cut = len(text) + 3, len(a) + 1
        fields: Fields = {
            name: np.full(n, IGNORE, np.int64) for name in ("tokens", "targets", "sentence_targets")
        }
        for name, values in (("tokens", shown), ("targets", wanted)):
            fields[name][1:cut], fields[name][cut + 1 : -1] = values[: len(a)], values[len(a) :]
        fields["tokens"][[0, cut, -1]] = self.cls, self.sep, self.sep
        fields["sentence_targets"][0] = label
        if self.has_segments:
            fields["segments"] = (np.arange(n) > cut).astype(np.int64)
        return fields


@OBJECTIVES.register("next_sentence")
class NextSentence(Segments):
    """Does B follow A in the text, or is it from another document? (Devlin et al. 2019, section 3.1; task 2.)

    A is the start of a piece, and B the rest of it or, half of the time, as many tokens from another document of the
    block. The place of the cut and the other document are drawn before the label, so that lengths tell nothing of
    it. In a block with no other document, the label is always 0. Where B is random, the rest of the piece is not read
    in this epoch; BERT's code reads it later, which would make lengths depend on labels.
    """

    needs_partners = True

    def build(self, piece: Piece, key: PieceKey) -> Fields:
        tokens, partners = piece.tokens, piece.partners
        n, (label, choice, at, start) = (
            len(tokens),
            keyed.uniform(4, *key_of(key, "next", self.config.static)),
        )
        lengths = partners.lengths
        if not len(lengths):
            cut = 1 + int(below(n - 1, at))
            return self.joined(tokens[:cut], tokens[cut:], IS_NEXT, key)
        # A document that could stand for half of the piece, if there is one.
        enough = np.flatnonzero(lengths >= min(int(lengths.max()), n // 2))
        other = int(enough[below(len(enough), choice)])
        least = max(1, n - int(lengths[other]))
        cut = least + int(below(n - least, at))
        if label < 0.5:
            return self.joined(tokens[:cut], tokens[cut:], IS_NEXT, key)
        first = int(below(int(lengths[other]) - (n - cut) + 1, start))
        return self.joined(tokens[:cut], partners.tokens(other)[first : first + n - cut], IS_RANDOM, key)


@OBJECTIVES.register("sentence_order")
class SentenceOrder(Segments):
    """Are two consecutive segments in their order, or swapped? (Lan et al. 2020, section 3.1.)"""

    def build(self, piece: Piece, key: PieceKey) -> Fields:
        tokens = piece.tokens
        label, at = keyed.uniform(2, *key_of(key, "order", self.config.static))
        cut = 1 + int(below(len(tokens) - 1, at))
        if label < 0.5:
            return self.joined(tokens[:cut], tokens[cut:], IN_ORDER, key)
        return self.joined(tokens[cut:], tokens[:cut], SWAPPED, key)
