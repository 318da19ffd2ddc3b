"""Classes that a model predicts in evaluation: counts of a confusion matrix, and the surest mistakes with their
pixels."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.data.contact_sheet import join_patches
from megatfm.data.sequences import IGNORE_INDEX
from megatfm.layers.classifier import ClassifierHead

Pixels = NDArray[np.uint8]


class Mistake(NamedTuple):
    """An image [H, W, C] that was taken for another class, with a probability."""

    probability: float
    label: int
    predicted: int
    pixels: Pixels


@dataclass
class ClassCollector:
    """Labels and predicted classes of the images that this rank has evaluated."""

    patch_size: int
    n_mistakes: int
    pairs: list[NDArray[np.int64]] = field(default_factory=list)
    _batch: dict[str, Tensor] = field(default_factory=dict)
    _mistakes: list[tuple[float, int, Mistake]] = field(default_factory=list)

    def see_batch(self, module: nn.Module, args: object, fields: dict[str, Any]) -> None:
        """Remember the micro-batch whose logits come next; a forward pre-hook of the model."""
        names = ("patches", "grid", "documents", "labels")
        self._batch = {name: fields[name] for name in names if fields.get(name) is not None}

    def add(self, logits_MC: Tensor, labels_M: Tensor) -> None:
        """Add the images of a micro-batch; of equal logits the lowest class counts as predicted."""
        probabilities = logits_MC.detach().double().softmax(-1).cpu().numpy()
        labels, predicted = labels_M.cpu().numpy(), probabilities.argmax(-1)
        self.pairs.append(np.stack([labels, predicted], axis=1).astype(np.int64))
        if not self.n_mistakes or "patches" not in self._batch:
            return
        for number in np.flatnonzero(labels != predicted).tolist():
            probability = float(probabilities[number, predicted[number]])
            if len(self._mistakes) == self.n_mistakes and probability <= self._mistakes[0][0]:
                continue
            pixels = pixels_of_label(self._batch, number, self.patch_size)
            mistake = Mistake(probability, int(labels[number]), int(predicted[number]), pixels)
            heapq.heappush(self._mistakes, (probability, -sum(map(len, self.pairs)) - number, mistake))
            if len(self._mistakes) > self.n_mistakes:
                heapq.heappop(self._mistakes)

    def gather(self) -> tuple[list[list[int]], list[Mistake]]:
        """Return [label, predicted, count] of every pair that occurs, and the surest mistakes of all ranks, the surest
        first. A collective."""
        gathered = object_collectives.all_gather((self.pairs, [entry[2] for entry in self._mistakes]))
        pairs = [part for parts, _ in gathered for part in parts]
        mistakes = [mistake for _, entries in gathered for mistake in entries]
        mistakes.sort(key=lambda mistake: (-mistake.probability, mistake.label, mistake.predicted))
        if not pairs:
            return [], []
        kinds, counts = np.unique(np.concatenate(pairs), axis=0, return_counts=True)
        return np.column_stack([kinds, counts]).tolist(), mistakes[: self.n_mistakes]


def pixels_of_label(batch: dict[str, Tensor], number: int, patch_size: int) -> Pixels:
    """Pixels [H, W, C] of the n-th labelled image of a micro-batch."""
    rows, tokens = (batch["labels"] != IGNORE_INDEX).nonzero(as_tuple=True)
    return pixels_at(batch, int(rows[number]), int(tokens[number]), patch_size)


def pixels_at(batch: dict[str, Tensor], row: int, token: int, patch_size: int) -> Pixels:
    """Pixels [H, W, C] of the image to which a token of a row belongs."""
    at = tokens_of_image(batch, row, token)
    grid = batch["grid"][row].cpu().numpy()
    patches = at[grid[at, 0] >= 0]
    return join_patches(batch["patches"][row].cpu().numpy()[patches], grid[at[0], 2:], patch_size)


def tokens_of_image(batch: dict[str, Tensor], row: int, token: int) -> NDArray[np.int64]:
    """Indices in its row of the tokens of the image to which one belongs; its special tokens first."""
    if "documents" in batch:
        documents = batch["documents"][row].cpu().numpy()
        return np.flatnonzero(documents == documents[token])
    return np.arange(batch["grid"].shape[1])


@contextmanager
def collect_classes(model: nn.Module, patch_size: int, n_mistakes: int = 0) -> Iterator[ClassCollector]:
    """Collect what a model's classifiers of images predict in evaluation, until the block ends."""
    collector = ClassCollector(patch_size, n_mistakes)
    heads = [module for module in model.modules() if isinstance(module, ClassifierHead)]
    hook = model.register_forward_pre_hook(collector.see_batch, with_kwargs=True)
    for head in heads:
        head.on_classes = collector.add
    try:
        yield collector
    finally:
        hook.remove()
        for head in heads:
            head.on_classes = None
