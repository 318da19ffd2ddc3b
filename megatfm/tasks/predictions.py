"""Predictions of a task, collected while an engine evaluates under any layout, and their metrics."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError
from megatfm.tasks.metrics import are_finite, calibration_error, list_metrics, refuse_broken_logits, span_f1
from megatfm.tasks.span_predictions import SpanPredictions

PredictionBatch = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[Any]]
"""Example index [N], word index [N], logits [N, C], targets [N] or [N, C]."""


@dataclass
class Predictions:
    """Logits [N, C] and targets [N] or [N, C] of examples, or of their words, sorted by example and word index [N]."""

    task: TaskConfig
    examples: NDArray[np.int64]
    words: NDArray[np.int64]
    logits: NDArray[np.float32]
    targets: NDArray[Any]

    @property
    def predicted(self) -> NDArray[Any]:
        """Predicted classes [N]; multilabel: flags [N, C] of positive logits; regression: values [N]."""
        if self.task.form == "multilabel":
            return (self.logits > 0).astype(np.int64)
        return self.logits[:, 0] if self.task.form == "regression" else self.logits.argmax(-1)

    @property
    def expected(self) -> NDArray[Any]:
        """Targets in the shape of `predicted`."""
        if self.task.form == "multilabel":
            return self.targets.astype(np.int64)
        return self.targets[:, 0] if self.task.form == "regression" else self.targets

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Softmax of the logits [N, C]; multilabel: the sigmoid."""
        logits = self.logits.astype(np.float64)
        if self.task.form == "multilabel":
            separate: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits))
            return separate
        exponentials: NDArray[np.float64] = np.exp(logits - logits.max(-1, keepdims=True))
        scaled: NDArray[np.float64] = exponentials / exponentials.sum(-1, keepdims=True)
        return scaled

    def metrics(self) -> dict[str, float]:
        """Return every metric of the task's form; NaN if the logits are not finite."""
        if not are_finite(self.logits):
            return dict.fromkeys(replace(self, logits=np.zeros_like(self.logits)).metrics(), math.nan)
        metrics = list_metrics(self.task)
        values = {name: metric(self.expected, self.predicted) for name, metric in metrics.items()}
        if self.task.form == "classification":
            values["calibration_error"] = calibration_error(self.expected, self.probabilities)
        if self.task.form == "tagging" and self.task.has_spans:
            expected, predicted = self._list_tags(self.expected), self._list_tags(self.predicted)
            return {"span_f1": span_f1(expected, predicted), **values}
        return values

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over the lines of the predictions file. `row` counts the file's rows from 1.

        Raises MegatfmError if the logits are not finite.
        """
        refuse_broken_logits(self.logits)
        labels, form = self.task.labels, self.task.form
        if form == "multiple_choice" and not labels:
            labels = [str(choice) for choice in range(self.logits.shape[1])]
        if form == "tagging":
            example_indices = np.unique(self.examples).tolist()
            for example, tags in zip(example_indices, self._list_tags(self.predicted), strict=True):
                yield {"row": example + 1, "labels": tags}
            return
        all_probabilities, all_predicted = self.probabilities, self.predicted
        for index, example in enumerate(self.examples.tolist()):
            if form == "regression":
                yield {"row": example + 1, "value": round(float(self.logits[index, 0]), 6)}
                continue
            probabilities = {
                label: round(float(p), 6)
                for label, p, logit in zip(labels, all_probabilities[index], self.logits[index], strict=False)
                if logit > -np.inf
            }
            if form == "multilabel":
                chosen = [label for label, flag in zip(labels, all_predicted[index], strict=True) if flag]
                yield {"row": example + 1, "labels": chosen, "probabilities": probabilities}
            else:
                best = labels[int(all_predicted[index])]
                yield {
                    "row": example + 1,
                    "label": best,
                    "probability": probabilities[best],
                    "probabilities": probabilities,
                }

    def _list_tags(self, classes: NDArray[Any]) -> list[list[str]]:
        """Return the labels of each example's words."""
        labels, (_, starts) = self.task.labels, np.unique(self.examples, return_index=True)
        return [[labels[index] for index in words.tolist()] for words in np.split(classes, starts[1:])]


@dataclass
class PredictionCollector:
    """Batches of logits that this rank's heads have computed."""

    parts: list[PredictionBatch] = field(default_factory=list)

    def add(self, examples: Tensor, words: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add the examples of a micro-batch."""
        indices = (examples.cpu().numpy(), words.cpu().numpy())
        self.parts.append((*indices, logits.detach().float().cpu().numpy(), targets.cpu().numpy()))

    def gather(self, task: TaskConfig, corpus: str) -> Predictions | SpanPredictions:
        """Gather all examples on every rank, each once. Collective.

        corpus: folder of the examples. Raises MegatfmError if no rank has any.
        """
        batches = [batch for batches in object_collectives.all_gather_object(self.parts) for batch in batches]
        if not batches:
            raise MegatfmError("no rank's head has predicted anything: evaluate a set with examples")
        examples, words, logits, targets = (np.concatenate(columns) for columns in zip(*batches, strict=True))
        _, unique = np.unique(np.stack([examples, words]), axis=1, return_index=True)
        columns = (examples[unique], words[unique], logits[unique], targets[unique])
        if task.form == "span_extraction":
            return SpanPredictions(task, corpus, *columns[:3])
        return Predictions(task, *(join_choices(*columns) if task.form == "multiple_choice" else columns))


def join_choices(
    examples: NDArray[np.int64], choices: NDArray[np.int64], logits: NDArray[np.float32], is_correct: NDArray[Any]
) -> PredictionBatch:
    """Group the logits of single choices [M, 1] by example.

    Returns example indices [N], zeros [N], logits [N, C] and the correct choices [N]. Missing choices of an example
    with fewer than C have −∞.
    """
    example_indices, example_positions = np.unique(examples, return_inverse=True)
    shape = len(example_indices), int(choices.max()) + 1
    choice_logits, correct = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
    choice_logits[example_positions, choices], correct[example_positions, choices] = logits[:, 0], is_correct
    return example_indices, np.zeros_like(example_indices), choice_logits, correct.argmax(1)


@contextmanager
def collect_predictions(model: nn.Module) -> Iterator[PredictionCollector]:
    """Collect the predictions of a model's task heads until the block ends."""
    heads: list[Any] = [module for module in model.modules() if hasattr(module, "on_logits")]
    collector = PredictionCollector()
    for head in heads:
        head.on_logits = collector.add
    try:
        yield collector
    finally:
        for head in heads:
            head.on_logits = None


def get_engine_model(engine: Any) -> nn.Module:
    """Return an engine's model. Raises MegatfmError for an engine without a `model`."""
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        raise MegatfmError(
            f"{type(engine).__name__} has no `model`, from whose heads predictions are collected: use "
            "parallel.engine = 'native'"
        )
    return model
