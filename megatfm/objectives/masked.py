"""Objectives that mask tokens for encoders: BERT's, RoBERTa's, ALBERT's, SpanBERT's and ELECTRA's."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm import rng
from megatfm.config import (
    MaskedObjective,
    ModelConfig,
    NextSentenceObjective,
    ReplacedTokenObjective,
    SentenceOrderObjective,
    SpanBoundaryObjective,
)
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    Floats,
    Ints,
    Objective,
    SpecialTokens,
    TokenArray,
    masking_key,
    max_piece_tokens,
    randint_below,
    require_head,
)
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import PieceKey


def stochastic_round(expected: float, u: float) -> int:
    """Return a whole number whose mean is `expected`, for uniform u in [0, 1)."""
    return int(np.floor(expected + u))


@dataclass(frozen=True)
class Masking:
    """BERT's masking (Devlin et al. 2019, section 3.1), of tokens or of whole words."""

    special: SpecialTokens
    mask: int
    rate: float
    mask_share: float
    random_share: float
    whole_words: bool = False

    @classmethod
    def of(cls, config: MaskedObjective | ReplacedTokenObjective, special: SpecialTokens) -> "Masking":
        """Return the masking of a config's section. Raises UsageError if the tokenizer lacks a required token."""
        mask = special.require_token("mask", config.name)
        if isinstance(config, ReplacedTokenObjective):
            return cls(special, mask, config.mask_rate, config.mask_replace_prob, 0.0)
        if config.whole_words:
            special.require_word_starts("objective.whole_words = true")
        return cls(
            special,
            mask,
            config.mask_rate,
            config.mask_replace_prob,
            config.random_replace_prob,
            config.whole_words,
        )

    def __call__(self, tokens: TokenArray, key: tuple[int | str, ...]) -> tuple[Ints, Ints]:
        """Return the inputs [n] after masking, and the targets [n]."""
        n = len(tokens)
        random = rng.uniform(3 * n + 1, *key)
        chosen = self._chosen(tokens, random[: n + 1])
        masked_tokens, targets = tokens.astype(np.int64), np.full(n, IGNORE, np.int64)
        targets[chosen] = masked_tokens[chosen]
        masked_tokens[chosen] = replace_masked(
            masked_tokens[chosen], random[n + 1 : 2 * n + 1][chosen], random[2 * n + 1 :][chosen], self
        )
        return masked_tokens, targets

    def _chosen(self, tokens: TokenArray, random: Floats) -> Ints:
        """Return the indices of chosen tokens: rate · n of them, rounded up or down at random so that the mean is exact
        for texts of any length."""
        budget = stochastic_round(self.rate * len(tokens), float(random[-1]))
        if not self.whole_words:
            return np.argsort(random[:-1], kind="stable")[:budget]
        starts = self.special.word_boundaries(tokens)
        return choose_words(starts, len(tokens), budget, random[: len(starts)])


def choose_words(starts: Ints, n: int, budget: int, random: Floats) -> Ints:
    """Return the indices of the tokens of words in random order, without words that would exceed the budget of tokens
    (as in BERT's code for whole words). starts [words]: where words begin among the n tokens."""
    lengths = np.diff(starts, append=n)
    order = np.argsort(random, kind="stable")
    total = np.cumsum(lengths[order])
    first = int(np.searchsorted(total, budget, side="right"))
    chosen, tokens_left = order[:first].tolist(), budget - int(total[first - 1] if first else 0)
    for word in order[first:]:
        if tokens_left == 0:
            break
        if lengths[word] <= tokens_left:
            chosen.append(word)
            tokens_left -= int(lengths[word])
    is_chosen = np.zeros(len(starts), bool)
    is_chosen[chosen] = True
    return np.flatnonzero(np.repeat(is_chosen, lengths))


def replace_masked(original: Ints, which: Floats, draw: Floats, masking: Masking) -> Ints:
    """Replace chosen tokens by the mask token, a random token, or themselves. `which` [n] ~ U[0, 1) selects the case,
    `draw` [n] ~ U[0, 1) the random token."""
    ordinary = masking.special.text_ids
    masked_tokens = original.copy()
    masked_tokens[which < masking.mask_share] = masking.mask
    random = (which >= masking.mask_share) & (which < masking.mask_share + masking.random_share)
    if random.any():
        masked_tokens[random] = ordinary[randint_below(len(ordinary), draw[random])]
    return masked_tokens


def single_segment_example(masked_tokens: Ints, targets: Ints, cls: int, sep: int) -> Example:
    """Return [CLS] text [SEP] with the text's targets."""
    tokens = np.empty(len(masked_tokens) + 2, np.int64)
    target_tokens = np.full(len(tokens), IGNORE, np.int64)
    tokens[0], tokens[1:-1], tokens[-1] = cls, masked_tokens, sep
    target_tokens[1:-1] = targets
    return {"tokens": tokens, "targets": target_tokens}


@OBJECTIVES.register("masked")
class Masked(Objective):
    """[CLS] text [SEP]; masked tokens are predicted (Devlin et al. 2019; dynamic masking: Liu et al. 2019)."""

    model_families = ("encoder",)
    predicts_tokens = True
    loss_weights: Mapping[str, float]
    allows_cross_document_attention = True

    def __init__(
        self,
        special: SpecialTokens,
        config: MaskedObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.config, self.masking = config, Masking.of(config, special)
        self.cls, self.sep = special.require_frame(config.name)
        self.loss_weights = {"masked": 1.0}
        self.max_tokens = max_piece_tokens(lambda n: n + 2, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        inputs, targets = self.masking(piece.tokens, masking_key(key, "masked", self.config.static))
        return single_segment_example(inputs, targets, self.cls, self.sep)


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
        self.config, self.masking = config, Masking.of(config, special)
        self.has_segments = model.embedding.n_segments > 1
        self.cls, self.sep = special.require_frame(config.name)
        self.loss_weights = {"masked": 1.0, "sentence": 1.0}
        self.padding_values = {"sentence_targets": IGNORE}
        self.max_tokens = max_piece_tokens(lambda n: n + 3, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 1, n_tokens + 3, 0)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"masked": "targets", "sentence": "sentence_targets"}
        return {term: (batch[field] != IGNORE).sum() for term, field in terms.items()}

    def two_segment_example(self, a: TokenArray, b: TokenArray, label: int, key: PieceKey) -> Example:
        """Return the sequence of two segments; marks are never masked."""
        text = np.concatenate([a, b])
        inputs, targets = self.masking(text, masking_key(key, self.config.name, self.config.static))
        n, cut = len(text) + 3, len(a) + 1
        fields: Example = {
            name: np.full(n, IGNORE, np.int64) for name in ("tokens", "targets", "sentence_targets")
        }
        for name, values in (("tokens", inputs), ("targets", targets)):
            fields[name][1:cut], fields[name][cut + 1 : -1] = values[: len(a)], values[len(a) :]
        fields["tokens"][[0, cut, -1]] = self.cls, self.sep, self.sep
        fields["sentence_targets"][0] = label
        if self.has_segments:
            fields["segments"] = (np.arange(n) > cut).astype(np.int64)
        return fields


@OBJECTIVES.register("next_sentence")
class NextSentence(SentencePair):
    """Predict whether B follows A in the text, or is from another document (Devlin et al. 2019, section 3.1; task 2).

    A is the start of a piece, and B the rest of it or, half of the time, as many tokens from another document of the
    block. The place of the cut and the other document are drawn before the label, so that lengths don't reveal it. In a
    block with no other document, the label is always 0. Where B is random, the rest of the piece is not read in this
    epoch; BERT's code reads it later, which would make lengths depend on labels.
    """

    needs_other_documents = True

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens, partners = piece.tokens, piece.other_documents
        n = len(tokens)
        label, choice, at, start = rng.uniform(4, *masking_key(key, "next", self.config.static))
        lengths = partners.lengths
        if not len(lengths):
            cut = 1 + int(randint_below(n - 1, at))
            return self.two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        # A document that could replace half of the piece, if there is one.
        enough = np.flatnonzero(lengths >= min(int(lengths.max()), n // 2))
        other_document = int(enough[randint_below(len(enough), choice)])
        min_cut = max(1, n - int(lengths[other_document]))
        cut = min_cut + int(randint_below(n - min_cut, at))
        if label < 0.5:
            return self.two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        first = int(randint_below(int(lengths[other_document]) - (n - cut) + 1, start))
        return self.two_segment_example(
            tokens[:cut], partners.tokens(other_document)[first : first + n - cut], IS_RANDOM, key
        )


@OBJECTIVES.register("sentence_order")
class SentenceOrder(SentencePair):
    """Predict whether two consecutive segments are in their order, or swapped (Lan et al. 2020, section 3.1)."""

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        label, at = rng.uniform(2, *masking_key(key, "order", self.config.static))
        cut = 1 + int(randint_below(len(tokens) - 1, at))
        if label < 0.5:
            return self.two_segment_example(tokens[:cut], tokens[cut:], IN_ORDER, key)
        return self.two_segment_example(tokens[cut:], tokens[:cut], SWAPPED, key)


@OBJECTIVES.register("span_boundary")
class SpanBoundary(Objective):
    """[CLS] text [SEP]; tokens of masked spans of whole words are predicted, and once more from the tokens around their
    span (SpanBERT: Joshi et al. 2020).

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
        self.cls, self.sep = special.require_frame(config.name)
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
        random = rng.uniform(2 * n + 2 * len(starts) + 1, *masking_key(key, "span_boundary"))
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
        """Return first tokens and ends [spans] of spans of words; `bounds` [words + 1] cuts the tokens into words."""
        n_words = len(bounds) - 1
        n_spans = stochastic_round(self.config.mask_rate * n_words / self.mean, float(random[-1]))
        words = 1 + np.searchsorted(self.cumulative_probs, random[:n_spans], side="right")
        # In a text of a few words, those at the end may find no room.
        words = words[np.cumsum(words + 1) <= n_words + 1].astype(np.int64)
        n_spans = len(words)
        free = n_words - int(words.sum()) - max(n_spans - 1, 0)
        # Spans and free words in random order: places of the spans are a uniform choice among them.
        places = np.sort(np.argsort(random[n_words : n_words + free + n_spans], kind="stable")[:n_spans])
        words_before = np.cumsum(words) - words
        first = (
            places + words_before
        )  # `places` counts for each earlier span one word, the one between the two
        return bounds[first], bounds[first + words]


@OBJECTIVES.register("replaced_token")
class ReplacedToken(Objective):
    """Replaced-token detection (Clark et al. 2020): [CLS] text [SEP], masked in `tokens` but not in `original`.

    The model's generator predicts the masked tokens and samples replacements, by `keys`; its discriminator tells for
    every token but padding whether it is the original one.
    """

    model_families = ("electra",)
    loss_weights: Mapping[str, float]
    padding_values: Mapping[str, int]
    allows_cross_document_attention = True

    def __init__(
        self,
        special: SpecialTokens,
        config: ReplacedTokenObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        self.masking = Masking.of(config, special)
        self.cls, self.sep = special.require_frame(config.name)
        self.loss_weights = {"generator": 1.0, "discriminator": config.discriminator_weight}
        self.padding_values = {"original": special.pad}
        self.max_tokens = max_piece_tokens(lambda n: n + 2, row_lengths[:1], config.name)

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.where(n_tokens > 0, n_tokens + 2, 0)

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        tokens = piece.tokens
        inputs, targets = self.masking(tokens, masking_key(key, "replaced_token"))
        fields = single_segment_example(inputs, targets, self.cls, self.sep)
        original = fields["tokens"].copy()
        original[1:-1] = tokens
        return fields | {"original": original}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        documents = batch.get("documents")
        # If a row is one document, all are counted.
        documents_or_tokens = batch["original"] if documents is None else documents
        return {
            "generator": (batch["targets"] != IGNORE).sum(),
            "discriminator": (documents_or_tokens >= 0).sum(),
        }
