"""Batches for the small models, and an objective that passes them on."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.config.heads import TextClassifierHeadConfig
from megatfm.objectives import Causal, Objective, SpecialTokens
from tests.support.images import draw_pixels, make_batch
from tests.support.models import FAMILY_MODELS, LENGTH, PREFIX_LM, ROWS

CAUSAL = Causal(SpecialTokens(bos=1, eos=2, pad=0))


def global_batch(seed: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """Packed rows with several documents each, padding, and an uneven number of targets from row to row."""
    random = np.random.default_rng(seed)
    tokens = torch.from_numpy(random.integers(0, 95, (rows, length)))
    targets = torch.from_numpy(random.integers(0, 95, (rows, length)))
    documents = torch.from_numpy(np.sort(random.integers(0, 3, (rows, length)), axis=1))
    padding = torch.arange(length)[None] >= length - torch.arange(rows)[:, None]
    targets[padding], documents[padding] = -100, -1
    starts = torch.tensor([[int((row == d).nonzero()[0]) for d in row] for row in documents])
    return {
        "tokens": tokens,
        "targets": targets,
        "documents": documents,
        "positions": torch.arange(length)[None] - starts,
    }


class PassThroughObjective:
    """Gives the model all that the batch holds and counts what has a target."""

    fields: ClassVar = {
        "causal": "targets", "permutation": "targets", "future_1": "ahead", "masked": "targets", "span": "targets",
        "generator": "targets", "sentence": "sentence_targets", "boundary": "span_left", "discriminator": "documents",
        "classifier": "labels", "answer_span": "examples", "choice": "choice_targets", "pixels": "masked",
    }  # fmt: skip

    def __init__(self, terms: list[str], passed: Iterable[str] = ()) -> None:
        """terms: those with a weight. passed: others that a model's losses may have, weighed by who wraps this."""
        self._passed = {*terms, *passed}
        self.loss_weights = {name: 1.0 + i for i, name in enumerate(sorted(terms))}

    field_prefixes = Objective.field_prefixes
    n_tokens = Objective.n_tokens

    def target_counts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._counted(name, batch).sum() for name in self.loss_weights}

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        losses = model(**{name: value for name, value in batch.items() if name != "ahead"}).losses
        # Without weights all terms; else not those that heads only measure in evaluation, such as accuracies.
        return {name: loss for name, loss in losses.items() if name in (self._passed or losses)}

    def _counted(self, name: str, batch: Mapping[str, Tensor]) -> Tensor:
        values = batch[self.fields[name]]
        return values > 0 if name in ("boundary", "pixels") else values >= 0


def image_batch(config: ModelConfig) -> dict[str, Tensor]:
    """Rows of four images, the last row with one less."""
    assert config.stages is not None
    height, width = (4 * side for side in config.stages.grid)
    images = [draw_pixels(height, width, seed=number) for number in range(5)]
    rows = [[(row + n) % 5 for n in range(4 - (row == ROWS - 1))] for row in range(ROWS)]
    return make_batch(images, 4, 0, rows, labels=[4, 0, 2, 1, 3])


def family_batch(config: ModelConfig) -> dict[str, Tensor]:
    """A batch with all fields that a model of this family and these heads takes."""
    batch = image_batch(config) if config.family == "hierarchical" else global_batch(seed=3)
    batch["keys"] = torch.arange(ROWS) * 7919 + 3
    if config.family == "hierarchical":
        return batch
    if config.family == "decoder":
        if config.n_mtp_heads:
            same = batch["documents"][:, 1:] == batch["documents"][:, :-1]
            batch["ahead"] = torch.full_like(batch["targets"], -100)
            batch["ahead"][:, :-1] = batch["targets"][:, 1:].where(same, -100)
        return batch
    if config.family == "encoder_decoder":
        other = global_batch(seed=4)
        for name in ("tokens", "positions", "documents"):
            batch[f"encoder_{name}"] = other[name]
        return batch
    if config.family == "xlnet":
        expected = (batch["tokens"] % 3 == 0) & (batch["documents"] >= 0)
        batch["targets"] = batch["tokens"].where(expected, -100)
        batch["order"] = (batch["tokens"] + 1).where(expected, 0)
        return batch | {"segments": batch["positions"] % 3}
    masked = torch.arange(LENGTH).remainder(5) == torch.arange(ROWS)[:, None].remainder(4)
    original, masked = batch["tokens"].clone(), masked & (batch["documents"] >= 0)
    batch["targets"] = original.where(masked, -100)
    batch["tokens"] = original.where(~masked, 4)
    if config.embedding.n_segments:
        batch["segments"] = batch["positions"].remainder(2)
    if config.family == "electra":
        batch["original"] = original
    if "sentence" in config.extra_heads:
        first = batch["positions"] == 0
        batch["sentence_targets"] = (original % 2).where(first & (batch["documents"] >= 0), -100)
    if "boundary" in config.extra_heads:
        inside = torch.arange(LENGTH).clamp(1, LENGTH - 2) == torch.arange(LENGTH)
        batch["span_left"] = batch["span_right"] = (masked & inside).long()
    return batch


def task_batch(config: ModelConfig) -> dict[str, Tensor]:
    """A batch for the head of a downstream task: labels at documents' first tokens, parts where the head has them."""
    batch = family_batch(config)
    batch.pop("targets")
    batch.pop("order", None)  # XLNet's, of what it predicts
    labels = batch.pop("sentence_targets", batch["tokens"] % 2)
    first = (batch["positions"] == 0) & (batch["documents"] >= 0)
    (head,) = config.extra_heads.values()
    numbers = torch.arange(labels.numel()).view_as(labels)
    batch["examples"] = numbers.where(first, -1)
    if head.name == "span_extraction":
        ends = torch.stack([(row == row[:, None]).sum(1) for row in batch["documents"]]) - 1
        places = batch["positions"]
        marks = (places == ends // 2).long() + 2 * (places == ends)
        return batch | {"answer_marks": marks.where(batch["documents"] >= 0, 0)}
    if isinstance(head, TextClassifierHeadConfig) and not head.both_orders:
        return batch | {"sentence_targets": labels.where(first, -100)}
    # One example a row, of as many parts as the row has documents; in the first rows another for the first document.
    order = first.long().cumsum(1) - 1
    is_split = (torch.arange(len(labels)) < 2)[:, None] & (order.amax(1, keepdim=True) > 0)
    batch["parts"] = (order - is_split.long()).clamp(min=0)
    example = 100 + 2 * torch.arange(len(labels))[:, None] + (is_split & (order > 0)).long()
    batch["examples"] = example.where(first, -1)
    heads = first & (batch["parts"] == 0)
    if head.name == "text_classifier":
        return batch | {"sentence_targets": labels.where(heads, -100)}
    rows = zip(example.expand_as(labels), first, strict=True)
    sizes = torch.stack([((row == row[:, None]) & hit).sum(1) for row, hit in rows])
    return batch | {"choice_targets": (sizes - 1).where(heads, -100)}


def family_case(name: str, deep: bool) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model and a batch for it; deep: of seven blocks, for eight stages, instead of two."""
    config = FAMILY_MODELS["llama" if name == PREFIX_LM else name]
    batch = family_batch(config)
    if name == PREFIX_LM:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    return (config.model_copy(update={"n_layers": 7}) if deep else config), batch
