"""Predictions of a task, collected while an engine evaluates, under any layout, and their metrics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError
from megatfm.tasks.metrics import classification_metrics


@dataclass
class Predictions:
    """Logits [N, C] and targets [N] of examples, in the order of their numbers [N]."""

    examples: NDArray[np.int64]
    logits: NDArray[np.float32]
    targets: NDArray[np.int64]

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The class of each example with the largest logit."""
        classes: NDArray[np.int64] = self.logits.argmax(-1)
        return classes

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Softmax of the logits, [N, C]."""
        shifted = self.logits.astype(np.float64)
        exponentials = np.exp(shifted - shifted.max(-1, keepdims=True))
        scaled: NDArray[np.float64] = exponentials / exponentials.sum(-1, keepdims=True)
        return scaled


@dataclass
class PredictionCollector:
    """Logits that this rank's heads have computed."""

    parts: list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]] = field(
        default_factory=list
    )

    def add(self, examples: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add the examples of a micro-batch."""
        self.parts.append(
            (examples.cpu().numpy(), logits.detach().float().cpu().numpy(), targets.cpu().numpy())
        )

    def gather(self) -> Predictions:
        """Gather all examples on every rank; copies that several ranks computed count once. A collective."""
        parts = [part for parts in object_collectives.all_gather(self.parts) for part in parts]
        if not parts:
            raise MegatfmError("no rank's head has predicted anything: evaluate a set with examples")
        examples, logits, targets = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        _, first = np.unique(examples, return_index=True)
        return Predictions(examples[first], logits[first], targets[first])


@contextmanager
def collect_predictions(model: nn.Module) -> Iterator[PredictionCollector]:
    """Collect what a model's task heads predict in evaluation, until the block ends."""
    heads: list[Any] = [module for module in model.modules() if hasattr(module, "on_logits")]
    collector = PredictionCollector()
    for head in heads:
        head.on_logits = collector.add
    try:
        yield collector
    finally:
        for head in heads:
            head.on_logits = None


def task_metrics(task: TaskConfig, predictions: Predictions) -> dict[str, float]:
    """Return the metrics of a task's form."""
    return classification_metrics(predictions.targets, predictions.predicted)


def prediction_rows(predictions: Predictions, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Iterate over predictions as rows: example, predicted label, its probability, and those of all labels."""
    probabilities = predictions.probabilities
    for place, number in enumerate(predictions.examples.tolist()):
        chosen = int(predictions.predicted[place])
        yield {
            "row": number + 1,
            "label": labels[chosen],
            "probability": round(float(probabilities[place, chosen]), 6),
            "probabilities": {
                label: round(float(p), 6) for label, p in zip(labels, probabilities[place], strict=True)
            },
        }


def model_of(engine: Any) -> nn.Module:
    """Return the model of an engine. Raises MegatfmError for an engine that doesn't show it."""
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        raise MegatfmError(
            f"{type(engine).__name__} has no `model`, from whose heads predictions are collected: use "
            "parallel.engine = 'native'"
        )
    return model
