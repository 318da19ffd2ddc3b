"""Confusion counts and surest mistakes of a classifier of images, on any number of ranks, against brute force."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.inference.image_classes import collect_classes
from megatfm.models import build
from tests.support.images import pixels, to_batch
from tests.support.workers import Workers

SIDE, CLASSES, IMAGES = 4, 4, 11
CONFIG = {
    "family": "encoder",
    "d_model": 16,
    "n_layers": 1,
    "attention.n_heads": 2,
    "ffn.d_ff": 16,
    "ffn.activation": "gelu",
    "norm.name": "layer_norm",
    "embedding.name": "patches",
    "embedding.patch_size": SIDE,
    "position.name": "sinusoidal_2d",
    "lm_head.name": "none",
    "extra_heads.classifier.n_classes": CLASSES,
}
SIZES = [(4 + 4 * (number % 3), 8 - 4 * (number % 2)) for number in range(IMAGES)]


def examples() -> tuple[torch.nn.Module, list[torch.Tensor], list[int]]:
    """A model of random weights, images of several shapes, and labels."""
    torch.manual_seed(5)
    model = build(ModelConfig.from_dotted(CONFIG)).double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    images = [pixels(*size, seed=number) for number, size in enumerate(SIZES)]
    return model, images, [number * 7 % CLASSES for number in range(IMAGES)]


def collected(rank: int, ranks: int, n_mistakes: int) -> tuple[list[list[int]], list[Any]]:
    """What a rank has after it evaluated its share, in rows of two images; one image is in quarantine."""
    model, images, labels = examples()
    labels[3] = -100
    with torch.no_grad(), collect_classes(model, SIDE, n_mistakes) as collector:
        for first in range(2 * rank, IMAGES, 2 * ranks):
            numbers = list(range(first, min(first + 2, IMAGES)))
            model(**to_batch(images, SIDE, 1, [numbers], labels=labels, row_length=20))
    assert all(getattr(module, "on_classes", None) is None for module in model.modules())
    return collector.gather()


def on_ranks(n_mistakes: int) -> tuple[list[list[int]], list[Any]]:
    """Run inside a process group."""
    return collected(torch.distributed.get_rank(), torch.distributed.get_world_size(), n_mistakes)


def expected_predictions() -> dict[int, tuple[int, int, float]]:
    """Image → label, predicted class and its probability, each image alone in a row."""
    model, images, labels = examples()
    predictions = {}
    for number in set(range(IMAGES)) - {3}:
        with torch.no_grad():
            logits = model(**to_batch([images[number]], SIDE, 1, [[0]])).predictions["classifier"][0].tolist()
        powers = [math.exp(value - max(logits)) for value in logits]
        best = max(range(CLASSES), key=lambda c: powers[c])
        predictions[number] = labels[number], best, powers[best] / sum(powers)
    return predictions


def test_counts_and_mistakes_of_one_rank() -> None:
    counts, mistakes = collected(0, 1, 3)
    expected = expected_predictions()
    pairs = Counter((label, predicted) for label, predicted, _ in expected.values())
    assert sorted(map(tuple, counts)) == sorted((*pair, count) for pair, count in pairs.items())
    wrong = {number: entry for number, entry in expected.items() if entry[0] != entry[1]}
    surest = sorted(wrong, key=lambda number: -wrong[number][2])[:3]
    assert len(mistakes) == len(surest) == 3
    _, images, _ = examples()
    for mistake, number in zip(mistakes, surest, strict=True):
        assert (mistake.label, mistake.predicted) == wrong[number][:2]
        assert mistake.probability == pytest.approx(wrong[number][2])
        np.testing.assert_array_equal(mistake.pixels, images[number].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_agree_with_one(ranks: int, workers: Workers) -> None:
    """Of 5 ranks with rows of two images, some have one row, the last but one image."""
    counts, mistakes = collected(0, 1, 4)
    for result in workers.run(on_ranks, ranks, 4):
        assert result[0] == counts
        assert [entry[:3] for entry in result[1]] == [entry[:3] for entry in mistakes]


def test_nothing_evaluated() -> None:
    model, *_ = examples()
    with collect_classes(model, SIDE) as collector:
        pass
    assert collector.gather() == ([], [])
