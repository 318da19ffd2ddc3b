"""Objectives of downstream tasks, on examples that `megatfm.tasks` has tokenized and labelled."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from megatfm.config import (
    AnswersObjective,
    ModelConfig,
    MultipleChoiceHeadConfig,
    MultipleChoiceObjective,
    PreferenceObjective,
    SpanExtractionHeadConfig,
    SpanExtractionObjective,
    TextClassificationObjective,
    TextClassifierHeadConfig,
)
from megatfm.config.section import Section
from megatfm.data.sequences import BEGINS, DocumentChunk, Field
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.loss_terms import FIRST_TARGET, PREFERENCE_TERMS
from megatfm.objectives.base import (
    DECODER_ONLY,
    ENCODER_DECODER,
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
    make_seq2seq_example,
)
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey

ANNOTATION = "json"
"""Extension of the file beside an example's tokens: its labels and segments, as JSON."""


def read_annotation(chunk: DocumentChunk) -> dict[str, Any]:
    """Return the annotation stored beside an example's tokens. Raises MegatfmError if the corpus has none."""
    stored = chunk.files.get(ANNOTATION)
    if stored is None:
        raise MegatfmError(
            f"a sample of the corpus has no .{ANNOTATION} file with its labels: use a corpus that `megatfm "
            "finetune` made"
        )
    annotation: dict[str, Any] = json.loads(stored)
    return annotation


class LabelledExamples(Objective):
    """Base of objectives on labelled examples such as [CLS] a [SEP] b [SEP]. Several examples share a row.

    An example may have several parts, texts that don't attend to one another, such as one for each choice. lm_weight:
    weight of next-token prediction as an auxiliary objective (Radford et al. 2018, section 3.2).
    """

    needs_files = True
    model_families = ("encoder", "decoder", "xlnet")
    fields: dict[str, Field]
    head_class: type[Section]
    """Class of the config of the head that it trains."""
    term: str
    """Name of the head's loss."""

    def __init__(self, special: SpecialTokens, name: str, model: ModelConfig, length: int, lm_weight: float) -> None:
        self.special, self.max_tokens, self.length = special, length, length
        self.ends_in_cls = model.family == "xlnet"  # <cls> is a segment of its own there
        self.has_segments = model.embedding.n_segments > 1 or self.ends_in_cls
        self.predicts_tokens = lm_weight > 0
        if self.predicts_tokens and model.family != "decoder":
            raise UsageError(
                f"objective.lm_weight = {lm_weight:g}: only a decoder predicts next tokens, and "
                f"model.family = {model.family!r}: leave lm_weight out"
            )
        heads: list[Any] = [head for head in model.extra_heads.values() if isinstance(head, self.head_class)]
        if not heads:
            raise UsageError(
                f"objective.name = {name!r} needs a model with a head of that name: add [model.extra_heads.sentence] "
                f"with name = {self.head_class.model_fields['name'].default!r}"
            )
        self.head = heads[0]
        self.loss_weights = {self.term: 1.0} | ({"causal": lm_weight} if self.predicts_tokens else {})
        self.fields = {"tokens": Field(pad_value=special.pad), "examples": Field(pad_value=-1)}
        if self.has_segments:
            self.fields["segments"] = Field()
        if self.predicts_tokens:
            self.fields["targets"] = Field(pad_value=IGNORE)

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return n_tokens

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        annotation, n = read_annotation(chunk), len(chunk.tokens)
        fields: Example = {name: field.filled(n) for name, field in self.fields.items()}
        fields["tokens"] = chunk.tokens.astype(np.int64)
        fields["examples"][annotation["at"]] = key.sample
        starts = np.array(annotation.get("starts", [0]))
        part_of_token = np.searchsorted(starts, np.arange(n), side="right") - 1
        if "parts" in fields:
            fields["parts"] = part_of_token
        if self.has_segments:
            second_starts = np.atleast_1d(annotation.get("second", n))
            fields["segments"] = (np.arange(n) >= second_starts[part_of_token]).astype(np.int64)
            if self.ends_in_cls:
                fields["segments"][np.append(starts[1:], n) - 1] = 2
        if self.predicts_tokens:
            fields["targets"][:-1] = np.where(part_of_token[1:] == part_of_token[:-1], fields["tokens"][1:], IGNORE)
        self.place_labels(fields, annotation)
        return fields

    def place_labels(self, fields: Example, annotation: Mapping[str, Any]) -> None:
        """Write the labels of an example into its fields."""
        raise NotImplementedError

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        counts = {self.term: self.n_labels(batch)}
        return counts | ({"causal": (batch["targets"] != IGNORE).sum()} if self.predicts_tokens else {})

    def n_labels(self, batch: Batch) -> Tensor:
        """Count the labels of a micro-batch."""
        return (batch["examples"] >= 0).sum()

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        n = int(random.integers(6, max(7, self.length // 2)))
        annotation = {"second": int(random.integers(1, n)), **self.random_annotation(random, n)}
        tokens = random.integers(0, self.special.vocab_size, n)
        return DocumentChunk(tokens, files={ANNOTATION: json.dumps(annotation).encode()})

    def random_annotation(self, random: np.random.Generator, n: int) -> dict[str, Any]:
        """Return a random annotation of `n` tokens."""
        raise NotImplementedError


@OBJECTIVES.register("text_classification")
class TextClassification(LabelledExamples):
    """Predict the labels of an example at the tokens that carry them.

    Encoders label the first token, decoders and XLNet the last, tagging the first of each word. If the head has
    `both_orders`, an example has two parts, the pair in both orders; the label is at the first.
    """

    head_class, term = TextClassifierHeadConfig, "sentence"

    def __init__(
        self, special: SpecialTokens, config: TextClassificationObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        super().__init__(special, config.name, model, row_lengths[0], config.lm_weight)
        self.predicts_classes = self.head.loss == "cross_entropy"
        value_field = Field("float32", (self.head.classes,))
        self.fields["sentence_targets"] = Field(pad_value=IGNORE) if self.predicts_classes else value_field
        self.fields["parts" if self.head.both_orders else "words"] = Field()

    def place_labels(self, fields: Example, annotation: Mapping[str, Any]) -> None:
        positions, labels = np.array(annotation["at"], np.int64), annotation["labels"]
        fields["sentence_targets"][positions[: len(labels)]] = labels
        if "words" in fields:
            fields["words"][positions] = np.arange(len(positions))

    def n_labels(self, batch: Batch) -> Tensor:
        labelled = batch["examples"] >= 0
        return (labelled & (batch["parts"] == 0)).sum() if self.head.both_orders else labelled.sum()

    def random_annotation(self, random: np.random.Generator, n: int) -> dict[str, Any]:
        positions = np.sort(random.choice(n, int(random.integers(1, 3)), replace=False))
        starts = {}
        if self.head.both_orders:
            middle = int(random.integers(1, n))
            positions, starts = np.array([middle - 1, n - 1]), {"starts": [0, middle], "second": [middle, n]}
        shape = (1 if starts else len(positions), self.head.classes)
        is_flag = self.head.loss == "binary_cross_entropy"
        values = random.integers(0, 2, shape) if is_flag else random.normal(size=shape)
        labels = random.integers(self.head.classes, size=shape[0]) if self.predicts_classes else values
        return {"at": positions.tolist(), "labels": labels.tolist(), **starts}


@OBJECTIVES.register("multiple_choice")
class MultipleChoice(LabelledExamples):
    """Predict the right choice by a score at one token of each choice. An example has one part for each choice."""

    head_class, term = MultipleChoiceHeadConfig, "choice"

    def __init__(
        self, special: SpecialTokens, config: MultipleChoiceObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        super().__init__(special, config.name, model, row_lengths[0], config.lm_weight)
        self.fields |= {"choice_targets": Field(pad_value=IGNORE), "parts": Field()}

    def place_labels(self, fields: Example, annotation: Mapping[str, Any]) -> None:
        fields["choice_targets"][annotation["at"][0]] = annotation["labels"][0]

    def n_labels(self, batch: Batch) -> Tensor:
        return (batch["choice_targets"] != IGNORE).sum()

    def random_annotation(self, random: np.random.Generator, n: int) -> dict[str, Any]:
        starts = np.sort(np.append(0, random.choice(np.arange(1, n), int(random.integers(1, 4)), replace=False)))
        ends = [*starts[1:].tolist(), n]
        label = int(random.integers(len(starts)))
        return {"at": [end - 1 for end in ends], "labels": [label], "starts": starts.tolist(), "second": ends}


@OBJECTIVES.register("span_extraction")
class SpanExtraction(LabelledExamples):
    """Predict the first and last token of a question's answer in a text (Devlin et al. 2019, section 4.3).

    The first token of the example, [CLS] or BOS, stands for no answer. `answer_marks`: 1 first token, 2 last token,
    3 both.
    """

    head_class, term = SpanExtractionHeadConfig, "answer_span"

    def __init__(
        self, special: SpecialTokens, config: SpanExtractionObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        super().__init__(special, config.name, model, row_lengths[0], 0.0)
        self.fields["answer_marks"] = Field()

    def place_labels(self, fields: Example, annotation: Mapping[str, Any]) -> None:
        ((begin, end),) = annotation["labels"]
        fields["answer_marks"][begin] += 1
        fields["answer_marks"][end] += 2

    def random_annotation(self, random: np.random.Generator, n: int) -> dict[str, Any]:
        return {"at": [0], "labels": [np.sort(random.integers(0, n, 2)).tolist()]}


@OBJECTIVES.register("answers")
class Answers(Objective):
    """Predict the tokens of answers, each from all tokens before it. Prompts are read and not predicted.

    Several examples share a row. An encoder-decoder's encoder reads the prompt and EOS, and its decoder predicts the
    answer and EOS (Raffel et al. 2020, section 2.4).
    """

    model_families = ("decoder", "encoder_decoder")
    predicts_tokens = True
    needs_files = True
    is_encoder_decoder = False

    def __init__(
        self, special: SpecialTokens, config: AnswersObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        self.special, self.length, self.target_length = special, row_lengths[0], row_lengths[-1]
        self.is_encoder_decoder = model.family == "encoder_decoder"
        self.field_prefixes = ENCODER_DECODER if self.is_encoder_decoder else DECODER_ONLY
        self.loss_weights = {"span" if self.is_encoder_decoder else "causal": 1.0}
        self.max_tokens = sum(row_lengths) if self.is_encoder_decoder else self.length + 1

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.maximum(n_tokens - 1, 0)

    @property
    def image_lengths(self) -> Callable[[IntArray], IntArray] | None:
        """Sequence lengths [n, 2] from the tokens of both sides [n, 2], which the index stores as image sizes."""
        return (lambda sizes: sizes + 1) if self.is_encoder_decoder else None

    @property
    def chunk_sizes(self) -> Callable[[DocumentChunk], tuple[int, int]] | None:
        """Function that returns the tokens of both sides of a chunk, for corpora without an index."""
        return _measure_answer if self.is_encoder_decoder else None

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        tokens, spans = chunk.tokens.astype(np.int64), read_annotation(chunk)["trained"]
        if self.is_encoder_decoder:
            ((begin, end),) = spans
            return make_seq2seq_example(tokens[:begin], tokens[begin:end], self.special)
        targets = np.full(len(tokens) - 1, IGNORE, np.int64)
        for begin, end in spans:
            targets[begin - 1 : end - 1] = tokens[begin:end]
        return {"tokens": tokens[:-1], "targets": targets}

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        n = int(random.integers(4, max(5, self.length // 2)))
        begin, end = np.sort(random.choice(np.arange(1, n + 1), 2, replace=False)).tolist()
        if self.is_encoder_decoder:  # the rest is the answer, to which the objective adds EOS
            end = n = min(n, begin + self.target_length - 1)
        tokens = random.integers(0, self.special.vocab_size, n)
        return DocumentChunk(tokens, files={ANNOTATION: json.dumps({"trained": [[begin, end]]}).encode()})


def _measure_answer(chunk: DocumentChunk) -> tuple[int, int]:
    ((begin, end),) = read_annotation(chunk)["trained"]
    return begin, end - begin


@OBJECTIVES.register("preference")
class Preferences(Objective):
    """Prefer the chosen answer to the rejected one, relative to a reference model's log-probabilities in the corpus.

    A sample is the chosen sequence, then the rejected one, each with its prompt. They don't attend to one another.
    """

    model_families = ("decoder",)
    predicts_tokens = True
    needs_files = True
    loss_weights: Mapping[str, float] = dict(zip(PREFERENCE_TERMS, (1.0, 0.0, 0.0), strict=True))
    metrics = PREFERENCE_TERMS[1:]

    def __init__(
        self, special: SpecialTokens, config: PreferenceObjective, model: ModelConfig, row_lengths: RowLengths
    ) -> None:
        refused_options = {"lm_head.label_smoothing": model.lm_head.label_smoothing, "n_mtp_heads": model.n_mtp_heads}
        for key, value in refused_options.items():
            if value:
                raise UsageError(
                    f"model.{key} = {value}: objective.name = 'preference' has a loss of pairs, not of tokens: set 0"
                )
        self.special, self.length = special, row_lengths[0]
        self.max_tokens = self.length + 2
        self.fields = {
            "tokens": Field(pad_value=special.pad),
            "targets": Field(pad_value=IGNORE),
            "pairs": Field(),
            "reference": Field("float32"),
            BEGINS: Field(),
        }

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        return np.maximum(n_tokens - 2, 0)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        annotation = read_annotation(chunk)
        second_start = int(annotation["second"])
        tokens = chunk.tokens.astype(np.int64)
        targets = np.full(len(tokens), IGNORE, np.int64)
        for begin, end in annotation["trained"]:
            targets[begin - 1 : end - 1] = tokens[begin:end]
        pairs, first_target = np.full(len(tokens), -1, np.int64), np.flatnonzero(targets != IGNORE)[0]
        pairs[:second_start], pairs[first_target] = 1, FIRST_TARGET
        reference, begin_marks = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int64)
        reference[first_target] = annotation["reference"]
        begin_marks[second_start] = 1
        fields: Example = {
            "tokens": tokens,
            "targets": targets,
            "pairs": pairs,
            "reference": reference,
            BEGINS: begin_marks,
        }
        # The last token of each sequence is only a target.
        is_input = np.ones(len(tokens), bool)
        is_input[[second_start - 1, -1]] = False
        return {name: values[is_input] for name, values in fields.items()}

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(PREFERENCE_TERMS, (batch["pairs"] == FIRST_TARGET).sum())

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        lengths = random.integers(3, max(4, self.length // 4), 2).tolist()
        first, second = lengths
        answers = random.integers(1, first), first + random.integers(1, second)
        trained = [[int(answers[0]), first], [int(answers[1]), first + second]]
        annotation = {"trained": trained, "second": first, "reference": float(random.normal())}
        tokens = random.integers(0, self.special.vocab_size, sum(lengths))
        return DocumentChunk(tokens, files={ANNOTATION: json.dumps(annotation).encode()})
