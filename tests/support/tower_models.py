"""Small models of two towers, their batches, and the losses written out: what layouts must reproduce."""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives.contrastive import Contrastive
from tests.support.image_models import COMMON, SIDE, SIZES
from tests.support.images import draw_pixels, make_batch

VOCABULARY, POSITIONS = 50, 7
TOWERS: dict[str, Any] = COMMON | {
    "family": "two_towers",
    "vocab_size": VOCABULARY,
    "text_tower": {"d_model": 12, "n_layers": 3, "n_heads": 6, "d_ff": 24, "max_positions": POSITIONS},
    "contrastive": {"width": 10, "scale": 3.0},
}
DROPOUTS = {"dropout": 0.2, "attention.dropout": 0.1, "ffn.dropout": 0.1, "drop_path": 0.3}
SIGLIP: dict[str, Any] = TOWERS | {
    "embedding.n_class_tokens": 0,
    "text_tower": {**TOWERS["text_tower"], "causal": False},
    "contrastive": {
        "loss": "sigmoid", "width": 24, "image_pool": "attention", "project_image": False,
        "projection_bias": True, "scale": 2.0, "bias": -1.5,
    },
}  # fmt: skip
TOWER_MODELS = {
    "softmax": ModelConfig.from_dotted(TOWERS),
    "sigmoid": ModelConfig.from_dotted(SIGLIP),
    "dropout": ModelConfig.from_dotted(TOWERS | DROPOUTS),
}
TOWER_ROWS, TEXT_LENGTH, IMAGE_LENGTH = 30, 12, 18
"""Rows, and the lengths of their two sides."""


def tower_batch(name: str) -> dict[str, Tensor]:
    """Rows of two pairs, one, or none, images of unlike sizes, captions of unlike lengths, padding on both sides."""
    config, n = TOWER_MODELS[name], len(SIZES)
    generator = torch.Generator().manual_seed(5)
    images = [draw_pixels(SIDE * height, SIDE * width, seed=seed) for seed, (height, width) in enumerate(SIZES)]
    rows: list[list[int]] = [[], [4, 0], [1], [2]]
    rows += [[row % n, (row + 1) % n] if row % 3 else [row % n] for row in range(TOWER_ROWS - len(rows))]
    n_special = config.embedding.n_special_tokens  # type: ignore[union-attr]
    side = make_batch(images, SIDE, n_special, rows, row_length=IMAGE_LENGTH)
    batch = {f"encoder_{field}": values for field, values in side.items()}
    shape = (TOWER_ROWS, TEXT_LENGTH)
    batch |= {"tokens": torch.zeros(shape, dtype=torch.int64), "positions": torch.zeros(shape, dtype=torch.int64)}
    batch["documents"] = torch.full(shape, -1)
    for row, pairs in enumerate(rows):
        begin = 0
        for document in range(len(pairs)):
            length = 2 + (row + 2 * document) % 4
            place = slice(begin, begin + length)
            batch["tokens"][row, place] = torch.randint(VOCABULARY, (length,), generator=generator)
            batch["positions"][row, place] = torch.arange(length)
            batch["documents"][row, place] = document
            begin += length
    return batch | {"keys": torch.arange(TOWER_ROWS) * 7919 + 3}


class TowerObjective(Contrastive):
    """The objective of a batch that is there already."""

    def __init__(self, *, evaluates: bool = False) -> None:
        self.loss_weights: Mapping[str, float] = {"contrastive": 1.0}
        if evaluates:
            self.loss_weights = {**self.loss_weights, "top1": 0.0, "top5": 0.0}


def caption_numbers(batch: Mapping[str, Tensor]) -> Tensor:
    """Numbers of captions [rows, T, 2] at their first tokens, as two parts; every third pair of rows has the same."""
    rows = torch.arange(len(batch["tokens"]), dtype=torch.int32)
    numbers = torch.where(rows % 3 == 0, 7, rows - 11)[:, None] + batch["documents"].int() * 100
    return torch.stack([numbers, -numbers], dim=-1)


def compute_reference_loss(kind: str, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The mean loss of pairs, from all logits at once."""
    logits = scale * images @ texts.T
    if kind != "sigmoid":
        same = torch.arange(len(logits))
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
    assert bias is not None
    sign = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
    return -F.logsigmoid(sign * (logits + bias)).sum() / len(logits)


@cache
def tower_reference(name: str) -> tuple[nn.Module, dict[str, Tensor], float]:
    """One device: the model with its gradients, the batch and the loss, once in a process for all that compare."""
    model, batch = build(TOWER_MODELS[name]).double().train(), tower_batch(name)
    initialise(model, 7)
    features = model(**batch).predictions
    loss = compute_reference_loss(name, features["images"], features["texts"], features["scale"], features.get("bias"))
    loss.backward()
    return model, batch, loss.item()


def tower_microbatches(batch: dict[str, Tensor], rank: int, ranks: int, n: int) -> list[dict[str, Tensor]]:
    """A rank's rows of a batch in `n` micro-batches."""
    first, end = (TOWER_ROWS * number // ranks for number in (rank, rank + 1))
    bounds = [first + (end - first) * number // n for number in range(n + 1)]
    return [{field: values[a:b] for field, values in batch.items()} for a, b in pairwise(bounds)]
