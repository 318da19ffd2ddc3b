"""Predictions of a task, collected while an engine evaluates, under any layout, and their metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError
from megatfm.tasks.metrics import METRICS_OF_FORM, calibration_error, span_f1
from megatfm.tasks.span_predictions import SpanPredictions

Part = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[Any]]


@dataclass
class Predictions:
    """Logits [N, C] and targets [N] or [N, C] of examples, or of their words, in the order of their numbers [N]."""

    task: TaskConfig
    examples: NDArray[np.int64]
    words: NDArray[np.int64]
    logits: NDArray[np.float32]
    targets: NDArray[Any]

    @property
    def predicted(self) -> NDArray[Any]:
        """The class with the largest logit; flags of classes with a positive one; or the number."""
        if self.task.form == "multilabel":
            return (self.logits > 0).astype(np.int64)
        return self.logits[:, 0] if self.task.form == "regression" else self.logits.argmax(-1)

    @property
    def expected(self) -> NDArray[Any]:
        """Labels that `predicted` is compared with."""
        if self.task.form == "multilabel":
            return self.targets.astype(np.int64)
        return self.targets[:, 0] if self.task.form == "regression" else self.targets

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Softmax of the logits [N, C]; of many labels, each class's own."""
        logits = self.logits.astype(np.float64)
        if self.task.form == "multilabel":
            separate: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
            return separate
        exponentials: NDArray[np.float64] = np.exp(logits - logits.max(-1, keepdims=True))
        scaled: NDArray[np.float64] = exponentials / exponentials.sum(-1, keepdims=True)
        return scaled

    def metrics(self) -> dict[str, float]:
        """Return every metric of the task's form."""
        table = METRICS_OF_FORM[self.task.form]
        values = {name: metric(self.expected, self.predicted) for name, metric in table.items()}
        if self.task.form == "classification":
            values["calibration_error"] = calibration_error(self.expected, self.probabilities)
        if self.task.form == "tagging" and self.task.has_spans:
            expected, predicted = self._tags(self.expected), self._tags(self.predicted)
            return {"span_f1": span_f1(expected, predicted), **values}
        return values

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over predictions by row of the file, counted from 1."""
        labels, form = self.task.labels, self.task.form
        if form == "multiple_choice" and not labels:
            labels = [str(number) for number in range(self.logits.shape[1])]
        if form == "tagging":
            numbers = np.unique(self.examples).tolist()
            for number, tags in zip(numbers, self._tags(self.predicted), strict=True):
                yield {"row": number + 1, "labels": tags}
            return
        for place, number in enumerate(self.examples.tolist()):
            if form == "regression":
                yield {"row": number + 1, "value": round(float(self.logits[place, 0]), 6)}
                continue
            shares = {
                label: round(float(p), 6)
                for label, p, logit in zip(
                    labels, self.probabilities[place], self.logits[place], strict=False
                )
                if logit > -np.inf
            }
            if form == "multilabel":
                chosen = [label for label, flag in zip(labels, self.predicted[place], strict=True) if flag]
                yield {"row": number + 1, "labels": chosen, "probabilities": shares}
            else:
                best = labels[int(self.predicted[place])]
                yield {"row": number + 1, "label": best, "probability": shares[best], "probabilities": shares}

    def _tags(self, classes: NDArray[Any]) -> list[list[str]]:
        """Return the labels of each example's words."""
        _, starts = np.unique(self.examples, return_index=True)
        parts = np.split(classes, starts[1:])
        return [[self.task.labels[number] for number in part.tolist()] for part in parts]


@dataclass
class PredictionCollector:
    """Logits that this rank's heads have computed."""

    parts: list[Part] = field(default_factory=list)

    def add(self, examples: Tensor, words: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add the examples of a micro-batch."""
        numbers = (examples.cpu().numpy(), words.cpu().numpy())
        self.parts.append((*numbers, logits.detach().float().cpu().numpy(), targets.cpu().numpy()))

    def gather(self, task: TaskConfig, corpus: str) -> Predictions | SpanPredictions:
        """Gather all examples on every rank; copies that several ranks computed count once. A collective.

        corpus: folder of the examples.
        """
        parts = [part for parts in object_collectives.all_gather(self.parts) for part in parts]
        if not parts:
            raise MegatfmError("no rank's head has predicted anything: evaluate a set with examples")
        examples, words, logits, targets = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        _, first = np.unique(np.stack([examples, words]), axis=1, return_index=True)
        columns = (examples[first], words[first], logits[first], targets[first])
        if task.form == "span_extraction":
            return SpanPredictions(task, corpus, *columns[:3])
        return Predictions(task, *(join_choices(*columns) if task.form == "multiple_choice" else columns))


def join_choices(
    examples: NDArray[np.int64],
    choices: NDArray[np.int64],
    logits: NDArray[np.float32],
    is_right: NDArray[Any],
) -> Part:
    """Return numbers of examples [N], zeros, the logits of their choices [N, C] and the right ones [N], from those of
    each choice. An example with fewer choices than another has −∞ for those that it lacks."""
    numbers, place = np.unique(examples, return_inverse=True)
    shape = len(numbers), int(choices.max()) + 1
    by_choice, right = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
    by_choice[place, choices], right[place, choices] = logits[:, 0], is_right
    return numbers, np.zeros_like(numbers), by_choice, right.argmax(1)


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


def model_of(engine: Any) -> nn.Module:
    """Return the model of an engine. Raises MegatfmError for an engine that doesn't show it."""
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        raise MegatfmError(
            f"{type(engine).__name__} has no `model`, from whose heads predictions are collected: use "
            "parallel.engine = 'native'"
        )
    return model
