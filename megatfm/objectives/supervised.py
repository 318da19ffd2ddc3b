"""Objectives of downstream tasks: examples that `megatfm.tasks` has tokenized, framed and labelled."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import ModelConfig, TextClassificationObjective, TextClassifierHeadConfig
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import MegatfmError, UsageError
from megatfm.objectives.base import OBJECTIVES, Batch, Example, Objective, SpecialTokens
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import PieceKey

ANNOTATION = "json"
"""Extension of the file beside an example's tokens: its labels and segments, as JSON."""


def read_annotation(piece: DocumentChunk) -> dict[str, Any]:
    """Return what is stored beside an example's tokens. Raises MegatfmError where the corpus is of no task."""
    stored = piece.files.get(ANNOTATION)
    if stored is None:
        raise MegatfmError(
            f"a sample of the corpus has no .{ANNOTATION} file with its labels: use a corpus that `megatfm "
            "finetune` made"
        )
    annotation: dict[str, Any] = json.loads(stored)
    return annotation


@OBJECTIVES.register("text_classification")
class TextClassification(Objective):
    """Predict the labels of an example at the tokens that carry them: its first in encoders, its last in decoders, the
    first of each word in tagging.

    Examples come framed, such as [CLS] a [SEP] b [SEP], and several share a row. With `lm_weight`, next tokens are
    predicted besides (Radford et al. 2018, section 3.2).
    """

    model_families = ("encoder", "decoder")
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
        heads = [head for head in model.extra_heads.values() if isinstance(head, TextClassifierHeadConfig)]
        if not heads:
            raise UsageError(
                f"objective.name = {config.name!r} needs a model with a head of that name: add "
                "[model.extra_heads.sentence] with name = 'text_classifier'"
            )
        self.special, self.head = special, heads[0]
        self.predicts_classes = self.head.loss == "cross_entropy"
        self.has_segments = model.embedding.n_segments > 1
        self.predicts_tokens = config.lm_weight > 0
        if self.predicts_tokens and model.family != "decoder":
            raise UsageError(
                f"objective.lm_weight = {config.lm_weight:g}: only a decoder predicts next tokens, and "
                f"model.family = {model.family!r}: leave lm_weight out"
            )
        self.loss_weights = {"sentence": 1.0} | ({"causal": config.lm_weight} if self.predicts_tokens else {})
        self.fields = self._fields()
        self.max_tokens = self.length = row_lengths[0]

    def _fields(self) -> dict[str, Field]:
        numbers = Field("float32", (self.head.classes,))
        fields = {
            "tokens": Field(pad_value=self.special.pad),
            "sentence_targets": Field(pad_value=IGNORE) if self.predicts_classes else numbers,
            "examples": Field(pad_value=-1),
            "words": Field(),
        }
        if self.has_segments:
            fields["segments"] = Field()
        if self.predicts_tokens:
            fields["targets"] = Field(pad_value=IGNORE)
        return fields

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        return n_tokens

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        annotation, n = read_annotation(piece), len(piece.tokens)
        at = np.array(annotation["at"], np.int64)
        fields: Example = {name: field.filled(n) for name, field in self.fields.items()}
        fields["tokens"] = piece.tokens.astype(np.int64)
        fields["sentence_targets"][at] = annotation["labels"]
        fields["examples"][at], fields["words"][at] = key.sample, np.arange(len(at))
        if self.has_segments:
            fields["segments"] = (np.arange(n) >= annotation.get("second", n)).astype(np.int64)
        if self.predicts_tokens:
            fields["targets"][:-1] = piece.tokens[1:]
        return fields

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        counts = {"sentence": (batch["examples"] >= 0).sum()}
        return counts | ({"causal": (batch["targets"] != IGNORE).sum()} if self.predicts_tokens else {})

    def random_piece(self, random: np.random.Generator) -> DocumentChunk:
        n = int(random.integers(3, max(4, self.length // 2)))
        at = np.sort(random.choice(n, int(random.integers(1, 3)), replace=False))
        shape = (len(at), self.head.classes)
        numbers = (
            random.integers(0, 2, shape) if self.head.loss.startswith("binary") else random.normal(size=shape)
        )
        labels = random.integers(self.head.classes, size=len(at)) if self.predicts_classes else numbers
        annotation = {"at": at.tolist(), "labels": labels.tolist(), "second": int(random.integers(1, n))}
        tokens = random.integers(0, self.special.vocab_size, n)
        return DocumentChunk(tokens, files={ANNOTATION: json.dumps(annotation).encode()})
