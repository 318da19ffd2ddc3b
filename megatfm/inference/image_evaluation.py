"""Evaluation on images: predicted classes, confusion matrices and confident mistakes, and pictures for the report."""

import heapq
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.config import Config
from megatfm.config.objective import ImageObjective
from megatfm.data.dataset import SizedRowDataset
from megatfm.data.sequences import IGNORE_INDEX
from megatfm.engines.interface import Engine, RunsModel
from megatfm.errors import UsageError
from megatfm.files import atomic_write, name_write_errors
from megatfm.layers.classifier import ClassifierHead
from megatfm.train.corpora import open_corpus

CONFUSION = "confusion.json"
Pixels = NDArray[np.uint8]

log = logging.getLogger("megatfm")


class Mistake(NamedTuple):
    """A misclassified image: pixels [H, W, C], and the probability of the predicted class."""

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

    def remember_batch(self, module: nn.Module, args: object, fields: dict[str, Any]) -> None:
        """Keep the micro-batch whose logits come next. A forward pre-hook of the model."""
        names = ("patches", "grid", "documents", "labels")
        self._batch = {name: fields[name] for name in names if fields.get(name) is not None}

    def add(self, logits_MC: Tensor, labels_M: Tensor) -> None:
        """Add the M images of a micro-batch. The lowest class of equal logits counts as predicted."""
        probabilities = logits_MC.detach().double().softmax(-1).cpu().numpy()
        labels, predicted = labels_M.cpu().numpy(), probabilities.argmax(-1)
        n_earlier = sum(map(len, self.pairs))
        self.pairs.append(np.stack([labels, predicted], axis=1).astype(np.int64))
        if not self.n_mistakes or "patches" not in self._batch:
            return
        for index in np.flatnonzero(labels != predicted).tolist():
            probability = float(probabilities[index, predicted[index]])
            if len(self._mistakes) == self.n_mistakes and probability <= self._mistakes[0][0]:
                continue
            pixels = get_labelled_pixels(self._batch, index, self.patch_size)
            mistake = Mistake(probability, int(labels[index]), int(predicted[index]), pixels)
            # Equally probable mistakes are ordered by their number, which differs, so that pixels are never compared.
            heapq.heappush(self._mistakes, (probability, -n_earlier - index, mistake))
            if len(self._mistakes) > self.n_mistakes:
                heapq.heappop(self._mistakes)

    def gather(self) -> tuple[list[list[int]], list[Mistake]]:
        """Return [label, predicted, count] of pairs that occur, and the most confident mistakes. Collective."""
        gathered = object_collectives.all_gather_object((self.pairs, [entry[2] for entry in self._mistakes]))
        pairs = [batch for batches, _ in gathered for batch in batches]
        mistakes = [mistake for _, entries in gathered for mistake in entries]
        mistakes.sort(key=lambda mistake: (-mistake.probability, mistake.label, mistake.predicted))
        if not pairs:
            return [], []
        distinct_pairs, counts = np.unique(np.concatenate(pairs), axis=0, return_counts=True)
        return np.column_stack([distinct_pairs, counts]).tolist(), mistakes[: self.n_mistakes]


def get_labelled_pixels(batch: dict[str, Tensor], index: int, patch_size: int) -> Pixels:
    """Return the pixels [H, W, C] of a micro-batch's labelled image at an index."""
    rows, tokens = (batch["labels"] != IGNORE_INDEX).nonzero(as_tuple=True)
    return get_image_pixels(batch, int(rows[index]), int(tokens[index]), patch_size)


def get_image_pixels(batch: dict[str, Tensor], row: int, token: int, patch_size: int) -> Pixels:
    """Return the pixels [H, W, C] of a token's image."""
    from megatfm.data.contact_sheet import join_patches  # needs Pillow

    token_indices = list_image_tokens(batch, row, token)
    grid = batch["grid"][row].cpu().numpy()
    patches = token_indices[grid[token_indices, 0] >= 0]
    return join_patches(batch["patches"][row].cpu().numpy()[patches], grid[token_indices[0], 2:], patch_size)


def list_image_tokens(batch: dict[str, Tensor], row: int, token: int) -> NDArray[np.int64]:
    """Return the indices in the row of all tokens of a token's image, special tokens first."""
    if "documents" in batch:
        documents = batch["documents"][row].cpu().numpy()
        return np.flatnonzero(documents == documents[token])
    return np.arange(batch["grid"].shape[1])


@contextmanager
def collect_classes(model: nn.Module, patch_size: int, n_mistakes: int = 0) -> Iterator[ClassCollector]:
    """Collect the predictions of a model's image classifiers until the block ends."""
    collector = ClassCollector(patch_size, n_mistakes)
    heads = [module for module in model.modules() if isinstance(module, ClassifierHead)]
    hook = model.register_forward_pre_hook(collector.remember_batch, with_kwargs=True)
    for head in heads:
        head.on_classes = collector.add
    try:
        yield collector
    finally:
        hook.remove()
        for head in heads:
            head.on_classes = None


class ImageEvaluation:
    """Collects classes and pictures while sets are evaluated. `collect_set` is a collective.

    n_images: examples of each gallery; 0: no pictures. Raises UsageError if the engine can't run its model for them.
    """

    def __init__(self, config: Config, engine: Engine, n_images: int) -> None:
        self._config, self._engine, self._n_images = config, engine, n_images
        self._sets: dict[str, dict[str, Any]] = {}
        self._galleries: list[Any] = []
        model = getattr(engine, "model", None)
        self._model = model if isinstance(model, nn.Module) else None
        if self._model is None:
            log.warning("%s does not show its model: the evaluation leaves no confusion matrix", type(engine).__name__)
        if n_images and not isinstance(engine, RunsModel):
            raise UsageError(
                f"--images: parallel.engine = {config.parallel.engine!r} can't run its model on examples: leave it out"
            )

    @contextmanager
    def collect_set(self, name: str, rows: SizedRowDataset) -> Iterator[None]:
        """Collect the predictions of a set that is evaluated inside the block. The first set gives the examples."""
        from megatfm.inference.pictures import make_galleries, make_mistakes_gallery

        classes = open_corpus(self._config, self._config.data.validation[name]).manifest.class_names
        if self._config.objective.name == "image_classification" and self._model is not None:
            patch_size = int(self._config.model.embedding.patch_size)  # type: ignore[union-attr]
            with collect_classes(self._model, patch_size, self._n_images) as collector:
                yield
            counts, mistakes = collector.gather()
            self._sets[name] = {"labels": list(classes), "counts": counts}
        else:
            mistakes = []
            yield
        if not self._n_images:
            return
        if not self._galleries and isinstance(self._engine, RunsModel):
            build_galleries = make_galleries(self._config, rows, self._n_images, self._engine.device, classes)
            self._galleries += self._engine.run_model(build_galleries)
        if mistakes:
            self._galleries.append(make_mistakes_gallery(mistakes, classes, name))

    def write(self, run_dir: Path, step: int) -> None:
        """Write the confusion matrices, and pictures if `n_images` > 0. Raises MegatfmError."""
        from megatfm.inference.pictures import write_pictures

        if self._sets:
            content = {"step": step, "sets": self._sets}
            with name_write_errors(run_dir / CONFUSION):
                atomic_write(run_dir / CONFUSION, json.dumps(content, ensure_ascii=False) + "\n")
        if self._n_images:
            write_pictures(run_dir, step, self._galleries)


def make_image_evaluation(config: Config, engine: Engine, n_images: int) -> ImageEvaluation | None:
    """Return the collector of a run on images; None for others. Raises UsageError if one of those asks for images."""
    if n_images and config.objective.name in ("contrastive", "image_to_text"):
        raise UsageError(
            f"--images: objective.name = {config.objective.name!r} has no pictures, which classifiers and models of "
            "masked images have: leave it out"
        )
    if isinstance(config.objective, ImageObjective):
        return ImageEvaluation(config, engine, n_images)
    if n_images:
        raise UsageError(f"--images: objective.name = {config.objective.name!r} reads no images: leave it out")
    return None
