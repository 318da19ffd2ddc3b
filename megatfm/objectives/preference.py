"""Preferences: pairs of a chosen and a rejected answer to one prompt, each pair in one row."""

import json
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from megatfm.config import ModelConfig, PreferenceObjective
from megatfm.data.sequences import BEGINS, DocumentChunk, Field
from megatfm.errors import UsageError
from megatfm.layers.preference import FIRST_TARGET, PREFERENCE_TERMS
from megatfm.objectives.base import (
    OBJECTIVES,
    Batch,
    Example,
    IntArray,
    Objective,
    RandomKeys,
    RowLengths,
    SpecialTokens,
)
from megatfm.objectives.supervised import ANNOTATION, read_annotation
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey


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
