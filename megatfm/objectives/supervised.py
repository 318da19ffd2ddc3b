"""Objectives of downstream tasks: examples that `megatfm.tasks` has tokenized, framed and labelled."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import ModelConfig, SequenceClassifierHeadConfig, TextClassificationObjective
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import MegatfmError, UsageError
from megatfm.objectives.base import OBJECTIVES, Batch, Example, Objective, SpecialTokens
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import PieceKey

ANNOTATION = "json"
"""Extension of the file beside an example's tokens: its label and segments, as JSON."""


def read_annotation(piece: DocumentChunk) -> dict[str, Any]:
    """Return what is stored beside an example's tokens. Raises MegatfmError where the corpus is of no task."""
    stored = piece.files.get(ANNOTATION)
    if stored is None:
        raise MegatfmError(
            f"a sample of the corpus has no .{ANNOTATION} file with its label: use a corpus that `megatfm "
            "finetune` made"
        )
    annotation: dict[str, Any] = json.loads(stored)
    return annotation


@OBJECTIVES.register("text_classification")
class Classification(Objective):
    """Predict the class of an example, at its first token.

    Examples come framed, such as [CLS] a [SEP] b [SEP], and several share a row.
    """

    model_families = ("encoder",)
    needs_files = True
    loss_weights: Mapping[str, float]
    fields: Mapping[str, Field]

    def __init__(
        self,
        special: SpecialTokens,
        config: TextClassificationObjective,
        model: ModelConfig,
        row_lengths: tuple[int, ...],
    ) -> None:
        heads = [
            head for head in model.extra_heads.values() if isinstance(head, SequenceClassifierHeadConfig)
        ]
        if not heads:
            raise UsageError(
                f"objective.name = {config.name!r} needs a model with a head of that name: add "
                "[model.extra_heads.sentence] with name = 'sequence_classifier'"
            )
        self.special, self.classes = special, heads[0].classes
        self.loss_weights = {"sentence": 1.0}
        self.has_segments = model.embedding.n_segments > 1
        self.fields = {
            "tokens": Field(pad_value=special.pad),
            "sentence_targets": Field(pad_value=IGNORE),
            "examples": Field(pad_value=-1),
        }
        if self.has_segments:
            self.fields["segments"] = Field()
        self.max_tokens = self.length = row_lengths[0]

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return n_tokens

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        annotation, n = read_annotation(piece), len(piece.tokens)
        targets, examples = np.full(n, IGNORE, np.int64), np.full(n, -1, np.int64)
        targets[0], examples[0] = annotation["label"], key.sample
        fields: Example = {
            "tokens": piece.tokens.astype(np.int64),
            "sentence_targets": targets,
            "examples": examples,
        }
        if self.has_segments:
            fields["segments"] = (np.arange(n) >= annotation.get("second", n)).astype(np.int64)
        return fields

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"sentence": (batch["sentence_targets"] != IGNORE).sum()}

    def random_piece(self, random: np.random.Generator) -> DocumentChunk:
        n = int(random.integers(3, max(4, self.length // 2)))
        annotation = {"label": int(random.integers(self.classes)), "second": int(random.integers(1, n))}
        tokens = random.integers(0, self.special.vocab_size, n)
        return DocumentChunk(tokens, files={ANNOTATION: json.dumps(annotation).encode()})
