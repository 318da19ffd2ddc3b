"""Two segments and what holds between them: next-sentence prediction and sentence order, with masked tokens."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import keyed
from megatfm.config import ModelConfig, NextSentenceObjective, SentenceOrderObjective
from megatfm.data import DocumentChunk
from megatfm.keyed import PieceKey
from megatfm.objectives.masking import Masking, masking_key, randint_below
from megatfm.objectives.registry import (
    OBJECTIVES,
    Batch,
    Example,
    Objective,
    SpecialTokens,
    TokenArray,
    max_piece_tokens,
    require_head,
)
from megatfm.ops.cross_entropy import IGNORE

IS_NEXT, IS_RANDOM = 0, 1
IN_ORDER, SWAPPED = 0, 1


class SentencePair(Objective):
    """[CLS] A [SEP] B [SEP] with masked tokens, and at [CLS] a label in `sentence_targets`; what A and B are is left to
    the two objectives below. Where the model has segments, B and its mark are segment 1."""

    model_families = ("encoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]
    padding_values: Mapping[str, int]

    def __init__(
        self,
        special: SpecialTokens,
        config: NextSentenceObjective | SentenceOrderObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        require_head(model, "sentence", config.name)
        self.config, self.masking, self.has_segments = (
            config,
            Masking.of(config, special),
            model.embedding.n_segments > 1,
        )
        self.cls, self.sep = (
            special.require_token("cls", config.name),
            special.require_token("sep", config.name),
        )
        self.loss_weights = {"masked": 1.0, "sentence": 1.0}
        self.padding_values = {"sentence_targets": IGNORE}
        self.max_tokens = max_piece_tokens(lambda n: n + 3, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 1, n_tokens + 3, 0)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"masked": "targets", "sentence": "sentence_targets"}
        return {term: (batch[field] != IGNORE).sum() for term, field in terms.items()}

    def two_segment_example(self, a: TokenArray, b: TokenArray, label: int, key: PieceKey) -> Example:
        """The sequence of two segments; marks are never masked."""
        text = np.concatenate([a, b])
        shown, wanted = self.masking(text, masking_key(key, self.config.name, self.config.static))
        n, cut = len(text) + 3, len(a) + 1
        fields: Example = {
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
class NextSentence(SentencePair):
    """Does B follow A in the text, or is it from another document? (Devlin et al. 2019, section 3.1; task 2.)

    A is the start of a piece, and B the rest of it or, half of the time, as many tokens from another document of the
    block. The place of the cut and the other document are drawn before the label, so that lengths tell nothing of
    it. In a block with no other document, the label is always 0. Where B is random, the rest of the piece is not read
    in this epoch; BERT's code reads it later, which would make lengths depend on labels.
    """

    needs_other_documents = True

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens, partners = piece.tokens, piece.other_documents
        n, (label, choice, at, start) = (
            len(tokens),
            keyed.uniform(4, *masking_key(key, "next", self.config.static)),
        )
        lengths = partners.lengths
        if not len(lengths):
            cut = 1 + int(randint_below(n - 1, at))
            return self.two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        # A document that could stand for half of the piece, if there is one.
        enough = np.flatnonzero(lengths >= min(int(lengths.max()), n // 2))
        other = int(enough[randint_below(len(enough), choice)])
        least = max(1, n - int(lengths[other]))
        cut = least + int(randint_below(n - least, at))
        if label < 0.5:
            return self.two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        first = int(randint_below(int(lengths[other]) - (n - cut) + 1, start))
        return self.two_segment_example(
            tokens[:cut], partners.tokens(other)[first : first + n - cut], IS_RANDOM, key
        )


@OBJECTIVES.register("sentence_order")
class SentenceOrder(SentencePair):
    """Are two consecutive segments in their order, or swapped? (Lan et al. 2020, section 3.1.)"""

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        label, at = keyed.uniform(2, *masking_key(key, "order", self.config.static))
        cut = 1 + int(randint_below(len(tokens) - 1, at))
        if label < 0.5:
            return self.two_segment_example(tokens[:cut], tokens[cut:], IN_ORDER, key)
        return self.two_segment_example(tokens[cut:], tokens[:cut], SWAPPED, key)
