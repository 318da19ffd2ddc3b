"""Evaluation on images: confusion matrices, and pictures for the report."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from megatfm.config import Config
from megatfm.config.objective import ImageObjective
from megatfm.data.dataset import SizedRowDataset
from megatfm.engines.interface import Engine, RunsModel
from megatfm.errors import UsageError
from megatfm.files import atomic_write, name_write_errors
from megatfm.train.corpora import open_corpus

CONFUSION = "confusion.json"

log = logging.getLogger("megatfm")


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
        from megatfm.inference.image_classes import collect_classes
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
