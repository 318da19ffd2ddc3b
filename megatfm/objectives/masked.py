"""Encoders that predict some tokens of a text: objectives of BERT, RoBERTa, ALBERT, SpanBERT, ELECTRA and XLNet."""

import numpy as np
from torch import Tensor

from megatfm import rng
from megatfm.config import (
    MaskedObjective,
    ModelConfig,
    NextSentenceObjective,
    PermutationObjective,
    ReplacedTokenObjective,
    SentenceOrderObjective,
    SpanBoundaryObjective,
)
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    FloatArray,
    IntArray,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
    TokenArray,
    find_max_chunk_tokens,
    make_masking_key,
    randint_below,
    require_head,
)
from megatfm.objectives.masking import Masking, make_single_segment_example, replace_masked, round_at_random
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey


class FramedObjective(Objective):
    """Base of objectives whose sequence is a chunk with special tokens around and in it.

    n_special: number of these tokens. min_tokens: a chunk of fewer tokens makes no sequence.
    """

    n_special, min_tokens = 2, 1

    def __init__(self, special: SpecialTokens, name: str, row_lengths: RowLengths) -> None:
        self.cls, self.sep = special.require_frame(name)
        self.max_tokens = find_max_chunk_tokens(lambda n: n + self.n_special, row_lengths[:1], name)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.where(n_tokens >= self.min_tokens, n_tokens + self.n_special, 0)


@OBJECTIVES.register("masked")
class Masked(FramedObjective):
    """Predict the masked tokens of [CLS] text [SEP] (Devlin et al. 2019; dynamic masking: Liu et al. 2019)."""

    model_families = ("encoder",)
    predicts_tokens = True
    allows_cross_document_attention = True

    def __init__(
        self, special: SpecialTokens, config: MaskedObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.config, self.masking = config, Masking.from_config(config, special)
        super().__init__(special, config.name, row_lengths)
        self.loss_weights = {"masked": 1.0}

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        inputs, targets = self.masking(chunk.tokens, make_masking_key(key, "masked", self.config.static))
        return make_single_segment_example(inputs, targets, self.cls, self.sep)


IS_NEXT, IS_RANDOM = 0, 1
IN_ORDER, SWAPPED = 0, 1


class SentencePair(FramedObjective):
    """Base of next-sentence and sentence-order prediction: [CLS] A [SEP] B [SEP] with masked tokens.

    `sentence_targets` has the pair's label at [CLS]. In models with segments, B and its [SEP] are segment 1.
    """

    model_families = ("encoder",)
    predicts_tokens = True
    n_special, min_tokens = 3, 2

    def __init__(
        self,
        special: SpecialTokens,
        config: NextSentenceObjective | SentenceOrderObjective,
        model: ModelConfig,
        row_lengths: RowLengths,
    ) -> None:
        require_head(model, "sentence", config.name)
        self.config, self.masking = config, Masking.from_config(config, special)
        self.has_segments = model.embedding.n_segments > 1
        super().__init__(special, config.name, row_lengths)
        self.loss_weights = {"masked": 1.0, "sentence": 1.0}
        self.padding_values = {"sentence_targets": IGNORE}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        terms = {"masked": "targets", "sentence": "sentence_targets"}
        return {term: (batch[field] != IGNORE).sum() for term, field in terms.items()}

    def make_two_segment_example(self, first: TokenArray, second: TokenArray, label: int, key: ChunkKey) -> Example:
        """Return the fields of [CLS] first [SEP] second [SEP]. Special tokens are never masked."""
        text = np.concatenate([first, second])
        inputs, targets = self.masking(text, make_masking_key(key, self.config.name, self.config.static))
        n, cut = len(text) + 3, len(first) + 1
        fields: Example = {name: np.full(n, IGNORE, np.int64) for name in ("tokens", "targets", "sentence_targets")}
        for name, values in (("tokens", inputs), ("targets", targets)):
            fields[name][1:cut], fields[name][cut + 1 : -1] = values[: len(first)], values[len(first) :]
        fields["tokens"][[0, cut, -1]] = self.cls, self.sep, self.sep
        fields["sentence_targets"][0] = label
        if self.has_segments:
            fields["segments"] = (np.arange(n) > cut).astype(np.int64)
        return fields


@OBJECTIVES.register("next_sentence")
class NextSentence(SentencePair):
    """Predict whether B follows A or is from another document (Devlin et al. 2019, section 3.1, task 2).

    A is the start of a chunk. B is its rest or, half of the time, as many tokens of another document of the block. Cut
    and other document are drawn before the label, so that lengths don't reveal it; nor do ends: a random B never has
    the other document's first token, and its last if the chunk has its document's. A block without another document
    always has label 0. Where B is random, the rest of the chunk is not read in this epoch; BERT's code reads it later,
    which would make lengths depend on labels.
    """

    needs_other_documents = True

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens, other_documents = chunk.tokens, chunk.other_documents
        n = len(tokens)
        random = rng.uniform(4, *make_masking_key(key, "next", self.config.static))
        label_uniform, choice_uniform, cut_uniform, start_uniform = random
        lengths = other_documents.lengths
        if not len(lengths):
            cut = 1 + int(randint_below(n - 1, cut_uniform))
            return self.make_two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        # Tokens of each document that B may have, and documents with enough of them for half of the chunk.
        usable = np.maximum(lengths - (1 if chunk.ends_document else 2), 1)
        candidates = np.flatnonzero(usable >= min(int(usable.max()), n // 2))
        other_document = int(candidates[randint_below(len(candidates), choice_uniform)])
        n_usable, n_other = int(usable[other_document]), int(lengths[other_document])
        min_cut = max(1, n - n_usable)
        cut = min_cut + int(randint_below(n - min_cut, cut_uniform))
        if label_uniform < 0.5:
            return self.make_two_segment_example(tokens[:cut], tokens[cut:], IS_NEXT, key)
        first = n_other - (n - cut)
        if not chunk.ends_document:
            first = min(first, 1 + int(randint_below(n_usable - (n - cut) + 1, start_uniform)))
        return self.make_two_segment_example(
            tokens[:cut], other_documents.tokens(other_document)[first : first + n - cut], IS_RANDOM, key
        )


@OBJECTIVES.register("sentence_order")
class SentenceOrder(SentencePair):
    """Predict whether two consecutive segments are in their order, or swapped (Lan et al. 2020, section 3.1)."""

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        label_uniform, cut_uniform = rng.uniform(2, *make_masking_key(key, "order", self.config.static))
        cut = 1 + int(randint_below(len(tokens) - 1, cut_uniform))
        if label_uniform < 0.5:
            return self.make_two_segment_example(tokens[:cut], tokens[cut:], IN_ORDER, key)
        return self.make_two_segment_example(tokens[cut:], tokens[:cut], SWAPPED, key)


@OBJECTIVES.register("span_boundary")
class SpanBoundary(FramedObjective):
    """Predict masked spans of whole words, also from the tokens around each span (SpanBERT: Joshi et al. 2020).

    A chunk of W words gets mask_rate · W / μ spans, rounded at random. Their lengths follow the geometric distribution
    with mean μ words; their positions are uniform, with a word or more between any two. So lengths and rate equal the
    paper's in the mean; its code instead draws spans until the budget is spent and cuts the last. One draw decides how
    all tokens of a span are replaced.

    `span_left` and `span_right` are the distances from a masked token to the tokens before and after its span, else 0.
    """

    model_families = ("encoder",)
    predicts_tokens = True

    def __init__(
        self, special: SpecialTokens, config: SpanBoundaryObjective, model: ModelConfig, row_lengths: RowLengths
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
        super().__init__(special, config.name, row_lengths)
        self.loss_weights = {"masked": 1.0, "boundary": 1.0}
        length_probs = (1 - config.geometric_p) ** np.arange(config.max_span_words)
        self.cumulative_probs = np.cumsum(length_probs / length_probs.sum())
        self.mean_span_words = float(1 + (1 - self.cumulative_probs).sum())

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        n, starts = len(tokens), self.special.find_word_boundaries(tokens)
        random = rng.uniform(2 * n + 2 * len(starts) + 1, *make_masking_key(key, "span_boundary"))
        span_starts, ends = self._choose_spans(np.append(starts, n), random[2 * n :])
        span_lengths = ends - span_starts
        # [CLS] is at position 0, so the chunk's tokens begin at 1.
        offsets = span_starts - np.cumsum(span_lengths) + span_lengths
        positions = 1 + np.arange(span_lengths.sum()) + np.repeat(offsets, span_lengths)
        fields: Example = {name: np.zeros(n + 2, np.int64) for name in ("tokens", "span_left", "span_right")}
        fields["tokens"][0], fields["tokens"][1:-1], fields["tokens"][-1] = self.cls, tokens, self.sep
        fields["targets"] = np.full(n + 2, IGNORE, np.int64)
        original = fields["tokens"][positions]
        fields["targets"][positions] = original
        case_uniform = np.repeat(random[: len(span_lengths)], span_lengths)
        fields["tokens"][positions] = replace_masked(
            original, case_uniform, random[n : n + len(positions)], self.masking
        )
        fields["span_left"][positions] = positions - np.repeat(span_starts, span_lengths)
        fields["span_right"][positions] = 1 + np.repeat(ends, span_lengths) - positions
        return fields

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"masked": (batch["targets"] != IGNORE).sum(), "boundary": (batch["span_left"] > 0).sum()}

    def _choose_spans(self, bounds: IntArray, random: FloatArray) -> tuple[IntArray, IntArray]:
        """Return first tokens and ends [spans] of random spans. bounds [words + 1]: first tokens of words, text end."""
        n_words = len(bounds) - 1
        n_spans = round_at_random(self.config.mask_rate * n_words / self.mean_span_words, float(random[-1]))
        span_words = 1 + np.searchsorted(self.cumulative_probs, random[:n_spans], side="right")
        # Drop the last spans if a short text has no room for them.
        span_words = span_words[np.cumsum(span_words + 1) <= n_words + 1].astype(np.int64)
        n_spans = len(span_words)
        n_free = n_words - int(span_words.sum()) - max(n_spans - 1, 0)
        # Shuffle spans and free words: the spans' slots are a uniform choice.
        span_slots = np.sort(np.argsort(random[n_words : n_words + n_free + n_spans], kind="stable")[:n_spans])
        words_before = np.cumsum(span_words) - span_words
        # A slot already counts one word for each earlier span: the word between the two.
        first_words = span_slots + words_before
        return bounds[first_words], bounds[first_words + span_words]


@OBJECTIVES.register("replaced_token")
class ReplacedToken(FramedObjective):
    """Replaced-token detection (Clark et al. 2020): [CLS] text [SEP], masked in `tokens` and unmasked in `original`.

    The model's generator predicts the masked tokens and samples replacements by `keys`. Its discriminator predicts for
    every token except padding whether it is the original one.
    """

    model_families = ("electra",)
    allows_cross_document_attention = True

    def __init__(
        self, special: SpecialTokens, config: ReplacedTokenObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.masking = Masking.from_config(config, special)
        super().__init__(special, config.name, row_lengths)
        self.loss_weights = {"generator": 1.0, "discriminator": config.discriminator_weight}
        self.padding_values = {"original": special.pad}

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        inputs, targets = self.masking(tokens, make_masking_key(key, "replaced_token"))
        fields = make_single_segment_example(inputs, targets, self.cls, self.sep)
        original = fields["tokens"].copy()
        original[1:-1] = tokens
        return fields | {"original": original}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        documents = batch.get("documents")
        # Without document ids, a row is one document and all its tokens count.
        documents_or_tokens = batch["original"] if documents is None else documents
        return {"generator": (batch["targets"] != IGNORE).sum(), "discriminator": (documents_or_tokens >= 0).sum()}


@OBJECTIVES.register("permutation")
class Permutation(FramedObjective):
    """Permutation language modelling: predict spans of A [SEP] B [SEP] [CLS] in a random order (Yang et al. 2019).

    A token is predicted from the tokens before it in that order, and from all tokens outside of spans. A span's length
    L is uniform from 1 to `max_span`. The span lies anywhere in a context of K · L tokens, K = `tokens_per_prediction`;
    contexts follow one another. The first context begins before the text, so that every token is predicted with
    probability 1 / K; parts of spans outside of the text are dropped.

    `order` is 0 for tokens that are not predicted (special ones too), and counts from 1 for targets. A and B are a
    chunk cut at a uniform position. Their segments are 0 and 1, and [CLS] has segment 2, as in the released code.
    """

    model_families = ("xlnet",)
    predicts_tokens = True
    n_special, min_tokens = 3, 2

    def __init__(
        self, special: SpecialTokens, config: PermutationObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.config = config
        super().__init__(special, config.name, row_lengths)
        self.loss_weights = {"permutation": 1.0}
        # The text's start falls into a context with a probability proportional to its length.
        self.cumulative_probs = np.cumsum(np.arange(1, config.max_span + 1)) / np.arange(1, config.max_span + 1).sum()

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens = chunk.tokens
        n = len(tokens)
        n_contexts = n // self.config.tokens_per_prediction + 2
        random = rng.uniform(2 * n_contexts + 2 + n, *make_masking_key(key, "permutation"))
        predicted_indices = self.choose_tokens(n, random[2 : 2 * n_contexts + 2], float(random[0]))
        cut = 1 + int(randint_below(n - 1, float(random[1])))
        # The first [SEP] shifts the tokens of B by one.
        positions = np.arange(n) + (np.arange(n) >= cut)
        fields: Example = {name: np.zeros(n + 3, np.int64) for name in ("tokens", "order", "segments")}
        fields["targets"] = np.full(n + 3, IGNORE, np.int64)
        fields["tokens"][positions] = tokens
        fields["tokens"][[cut, n + 1, n + 2]] = self.sep, self.sep, self.cls
        fields["targets"][positions[predicted_indices]] = tokens[predicted_indices]
        order = np.argsort(random[2 * n_contexts + 2 :][: len(predicted_indices)], kind="stable")
        fields["order"][positions[predicted_indices[order]]] = 1 + np.arange(len(order))
        fields["segments"][cut + 1 :] = 1
        fields["segments"][-1] = 2
        return fields

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of the content stream and the queries of predicted tokens."""
        return super().n_tokens(batch) + (batch["targets"] != IGNORE).sum()

    def choose_tokens(self, n: int, random: FloatArray, start_uniform: float) -> IntArray:
        """Return the indices of the tokens in spans of a text of n tokens.

        random [2 · contexts] and start_uniform: uniform in [0, 1).
        """
        length_uniforms, offset_uniforms = np.split(random, 2)
        spans = 1 + randint_below(self.config.max_span, length_uniforms)
        spans[0] = 1 + np.searchsorted(self.cumulative_probs, length_uniforms[0], side="right")
        contexts = self.config.tokens_per_prediction * spans
        starts = np.cumsum(contexts) - contexts - randint_below(int(contexts[0]), start_uniform)
        firsts = starts + randint_below(contexts - spans + 1, offset_uniforms)
        indices = np.repeat(firsts - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
        return indices[(indices >= 0) & (indices < n)]
