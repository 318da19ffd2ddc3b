"""Accuracies of images and of captions that are found are the same on any ranks, in any batches, padded and packed."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatfm.config import Config, ModelConfig
from megatfm.corpus.manifest import NO_TOKENIZER
from megatfm.corpus.writer import ShardWriter
from megatfm.inference.image_evaluation import collect_classes
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate_sets
from tests.support.finetuning_tasks import write_tasks
from tests.support.golden_curves import CLASSES, SIDE, make_image_files
from tests.support.image_models import COMMON
from tests.support.workers import Workers

IMAGES = 19
MODELS: dict[str, dict[str, Any]] = {
    "image_classification": {"extra_heads.classifier.n_classes": CLASSES, "extra_heads.classifier.hidden": True},
    "contrastive": {
        "family": "two_towers",
        "text_tower": {"d_model": 12, "n_layers": 1, "n_heads": 2, "d_ff": 24, "max_positions": 8},
        "contrastive": {"width": 10, "scale": 3.0},
    },
}  # fmt: skip
ROW_LENGTHS = {
    "image_classification": [{"sequence_length": 5}, {"sequence_length": 21}],
    "contrastive": [{"sequence_length": 5, "target_length": 8}, {"sequence_length": 21, "target_length": 30}],
}  # fmt: skip
"""Rows of one image, which are padded on the captions' side, and of several."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and corpora of images with classes or captions, of which some are the same."""
    folder = tmp_path_factory.mktemp("images")
    write_tasks(folder)
    _, tokenizer = open_tokenizer(evaluation_config(folder, "contrastive", ROW_LENGTHS["contrastive"][0]))
    assert tokenizer is not None
    for name, hash_ in (("image_classification", NO_TOKENIZER), ("contrastive", tokenizer.hash)):
        with ShardWriter(folder / name, tokenizer_hash=hash_, token_dtype="uint16") as writer:
            for number in range(IMAGES):
                has_caption = name == "contrastive"
                caption = np.arange(20, 21 + number % 5) + number // 2 * has_caption
                writer.add(
                    f"{number:04d}", (caption if has_caption else caption[:0]).astype(np.uint16), "drawn", 1,
                    members=make_image_files(number), image_size=(SIDE, SIDE),
                )  # fmt: skip
            writer.finish({})
    return folder


def evaluation_config(folder: Path, objective: str, data: dict[str, int], micro_batch: int = 1) -> Config:
    model = {
        **COMMON, **MODELS[objective], "init.std": 0.5, "embedding.channels": 1, "embedding.mean": [0.5],
        "embedding.std": [0.5], "position.grid": (2, 2),
    }  # fmt: skip
    corpus = str(folder / objective)
    return Config.model_validate(
        {
            "name": "images",
            "run_dir": str(folder / "run"),
            "model": ModelConfig.from_dotted(model),
            "objective": {"name": objective},
            "data": {
                "train": corpus,
                "validation": {"images": corpus},
                "images": {"size": SIDE, "crop_pct": 1.0},
                **({"tokenizer": str(folder / "tokenizer.model")} if objective == "contrastive" else {}),
                **data,
            },
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 32 * 7 * 6, "micro_batch": micro_batch, "seed": 5},
        }
    )


def evaluate_images(folder: Path, objective: str) -> list[dict[str, Any]]:
    """Evaluate an untrained model in batches of 1, 7 and 32, each with one image in a row, then with several."""
    torch.set_num_threads(1)
    results = []
    for micro_batch in (1, 7, 32):
        for data in ROW_LENGTHS[objective]:
            config, tokenizer = open_tokenizer(evaluation_config(folder, objective, data, micro_batch))
            mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
            engine = build_engine(config, mesh, torch.device("cpu"), "fp64")
            with collect_classes(engine.model, SIDE // 2, n_mistakes=3) as collector:
                sets = evaluate_sets(engine, open_corpora(config, tokenizer), config, 0, lambda: None)
            result = sets["images"]
            counts, mistakes = collector.gather()
            surest = [(mistake.label, mistake.predicted) for mistake in mistakes]
            results.append(
                {"rows": result["rows"], "loss": result["loss"], "metrics": result["metrics"],
                 "seen": (counts, surest)},
            )  # fmt: skip
    return results


@pytest.mark.parametrize("objective", MODELS)
def test_images_have_the_same_metrics(workers: Workers, folder: Path, objective: str) -> None:
    (alone,) = workers.run(evaluate_images, 1, folder, objective)
    expected = alone[0]
    assert expected["metrics"].keys() == {"top1", "top5"}
    assert 0 < expected["metrics"]["top1"] < expected["metrics"]["top5"] < 1
    if objective == "image_classification":
        assert sum(count for *_, count in expected["seen"][0]) == IMAGES
    for ranks in (1, 3):  # three have unequal shares, as two have
        for results in workers.run(evaluate_images, ranks, folder, objective) if ranks > 1 else [alone]:
            for number, result in enumerate(results):
                assert result["rows"] <= IMAGES // 3 if number % 2 else result["rows"] == IMAGES
                assert result["metrics"] == expected["metrics"]
                assert result["seen"] == expected["seen"]
                assert math.isclose(result["loss"], expected["loss"], rel_tol=1e-12)
