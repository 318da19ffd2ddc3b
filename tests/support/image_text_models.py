"""Small two-tower and vision-language models and their batches, whose gradients layouts must reproduce."""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives.contrastive import Contrastive
from tests.support.batches import PassThroughObjective
from tests.support.image_models import COMMON, SIDE, SIZES
from tests.support.images import draw_pixels, make_batch
from tests.support.layouts import make_cases_by_ranks
from tests.support.models import ROWS
from tests.support.parity import one_device_reference

IMAGE_LENGTH = 18
"""Length of the side of images of a row."""

# Two towers

TOWER_VOCABULARY, POSITIONS = 50, 7
TOWERS: dict[str, Any] = COMMON | {
    "family": "two_towers",
    "vocab_size": TOWER_VOCABULARY,
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
TOWER_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {"zero 0": ParallelConfig(dp_shard=2, zero=0), "zero 1": ParallelConfig(dp_shard=2, zero=1),
        "zero 2": ParallelConfig(dp_shard=2, zero=2), "zero 3": ParallelConfig(dp_shard=2),
        "tp 2": ParallelConfig(tp=2), "cp 2": ParallelConfig(cp=2, zero=0), "pp 2": ParallelConfig(pp=2),
        "pp 2, cut between the towers": ParallelConfig(pp=2, pp_split_points=["text.embedding"]),
        "pp 2 interleaved": ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=2),
        "pp 2 zbv": ParallelConfig(pp=2, pp_schedule="zbv"), "pp 2 gpipe": ParallelConfig(pp=2, pp_schedule="gpipe"),
        "pp 2 interleaved zero bubble": ParallelConfig(pp=2, pp_schedule="interleaved-zero-bubble"),
        "pp 2 dualpipev": ParallelConfig(pp=2, pp_schedule="dualpipev")},
    3: {
        "zero 1": ParallelConfig(dp_shard=3, zero=1),
        "zero 3": ParallelConfig(dp_shard=3),
        "tp 3": ParallelConfig(tp=3),
        "tp 3 without sequence parallelism": ParallelConfig(tp=3, sequence_parallel=False),
        "cp 3": ParallelConfig(cp=3, zero=0),
        "pp 3": ParallelConfig(pp=3),
    },
    4: {"replicas": ParallelConfig(dp_replicate=2, dp_shard=2), "tp 2": ParallelConfig(dp_shard=2, tp=2),
        "cp 2": ParallelConfig(dp_shard=2, cp=2), "cp 2 × tp 2": ParallelConfig(cp=2, tp=2),
        "pp 2 × zero 1": ParallelConfig(pp=2, dp_shard=2, zero=1), "pp 2 × zero 3": ParallelConfig(pp=2, dp_shard=2),
        "pp 2 × replicas": ParallelConfig(pp=2, dp_replicate=2), "pp 2 × tp 2": ParallelConfig(pp=2, tp=2),
        "pp 2 × cp 2": ParallelConfig(pp=2, cp=2)},
    5: {"zero 0": ParallelConfig(dp_shard=5, zero=0), "zero 3": ParallelConfig(dp_shard=5),
        "cp 5": ParallelConfig(cp=5, zero=0)},
}  # fmt: skip
TOWER_ROWS, CAPTIONS_LENGTH = 30, 12


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
    shape = (TOWER_ROWS, CAPTIONS_LENGTH)
    batch |= {"tokens": torch.zeros(shape, dtype=torch.int64), "positions": torch.zeros(shape, dtype=torch.int64)}
    batch["documents"] = torch.full(shape, -1)
    for row, pairs in enumerate(rows):
        begin = 0
        for document in range(len(pairs)):
            length = 2 + (row + 2 * document) % 4
            place = slice(begin, begin + length)
            batch["tokens"][row, place] = torch.randint(TOWER_VOCABULARY, (length,), generator=generator)
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


# Vision-language models

IMAGE_TOKEN, VOCABULARY = 55, 60
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
TEXT_LENGTH = 24
LLAVA: dict[str, Any] = {
    "family": "vision_language",
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "n_layers": 2,
    "attention.n_heads": 6,
    "ffn.d_ff": 36,
    "vision_tower": {
        "d_model": 12, "n_layers": 3, "n_heads": 6, "d_ff": 18, "grid": (3, 3),
        "embedding": {"name": "patches", "patch_size": SIDE, "bias": False, "norm": True, "mean": MEAN, "std": STD},
    },
    "connector": {"image_token_id": IMAGE_TOKEN},
}  # fmt: skip
LLAVA_MODELS = {
    "mlp": ModelConfig.from_dotted(LLAVA),
    "linear": ModelConfig.from_dotted(
        LLAVA | {"connector": {"name": "linear", "image_token_id": 7, "bias": False}, "embedding.tied": True}
    ),
    "experts": ModelConfig.from_dotted(
        {key: value for key, value in LLAVA.items() if key != "ffn.d_ff"}
        | {"ffn": {"name": "moe", "d_ff": 18, "n_experts": 6, "top_k": 2}}
    ),
    "dropout": ModelConfig.from_dotted(LLAVA | {"dropout": 0.2, "attention.dropout": 0.1, "ffn.dropout": 0.1}),
}
LLAVA_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero 0": ParallelConfig(dp_shard=2, zero=0), "zero 1": ParallelConfig(dp_shard=2, zero=1),
        "zero 2": ParallelConfig(dp_shard=2, zero=2), "zero 3": ParallelConfig(dp_shard=2),
        "replicas": ParallelConfig(dp_replicate=2), "tp": ParallelConfig(tp=2),
        "tp without sequence parallelism": ParallelConfig(tp=2, sequence_parallel=False), "1f1b": ParallelConfig(pp=2),
        "interleaved": ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=2),
        "gpipe": ParallelConfig(pp=2, pp_schedule="gpipe"),
        "interleaved zero bubble": ParallelConfig(pp=2, pp_schedule="interleaved-zero-bubble"),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"), "dualpipev": ParallelConfig(pp=2, pp_schedule="dualpipev"),
        "pp, cut behind the connector": ParallelConfig(pp=2, pp_split_points=["decoder.embedding"]),
        "pp, cut before the connector": ParallelConfig(pp=2, pp_split_points=["connector"]),
        "cp": ParallelConfig(cp=2, zero=0),
    },
    3: {
        "tp": ParallelConfig(tp=3), "tp without sequence parallelism": ParallelConfig(tp=3, sequence_parallel=False),
        "pp": ParallelConfig(pp=3), "cp": ParallelConfig(cp=3, zero=0),
        "cp by Ulysses": ParallelConfig(cp=3, cp_method="ulysses", zero=0),
    },
    4: {
        "tp × pp": ParallelConfig(tp=2, pp=2), "tp × zero 3": ParallelConfig(tp=2, dp_shard=2),
        "pp × zero 1": ParallelConfig(pp=2, dp_shard=2, zero=1), "pp × zero 3": ParallelConfig(pp=2, dp_shard=2),
        "replicas × zero 3": ParallelConfig(dp_replicate=2, dp_shard=2), "cp × tp": ParallelConfig(cp=2, tp=2),
        "cp × pp, cut behind the connector": ParallelConfig(cp=2, pp=2, pp_split_points=["decoder.embedding"]),
        "cp × zero 3": ParallelConfig(cp=2, dp_shard=2),
    },
    5: {"cp": ParallelConfig(cp=5, zero=0)},
}  # fmt: skip
LLAVA_CASES = make_cases_by_ranks(
    LLAVA_MODELS, LLAVA_LAYOUTS, always=["one process", "cp"],
    extended={2: ["zero 0", "zero 2", "replicas", "gpipe", "interleaved", "dualpipev"],
              3: ["tp without sequence parallelism", "pp"],
              4: ["pp × zero 1", "replicas × zero 3", "cp × zero 3", "tp × zero 3"], 5: ["cp"]},
)  # fmt: skip
"""Cells of the grid of models and layouts; those of later tiers are marked."""
TEXT_ALONE = -1
"""A sample without an image."""


def llava_batch(name: str) -> dict[str, Tensor]:
    """Rows of two samples, one (with two images, too), or a text alone beside one; images of unlike sizes; padding."""
    config, n = LLAVA_MODELS[name], len(SIZES)
    assert config.connector is not None
    image_token = config.connector.image_token_id
    images = [draw_pixels(SIDE * height, SIDE * width, seed=seed) for seed, (height, width) in enumerate(SIZES)]
    samples: list[list[int]] = [[TEXT_ALONE], [4, 0], [TEXT_ALONE, 1], [2]]
    samples += [[row % n, (row + 1) % n] if row % 3 else [row % n] for row in range(ROWS - len(samples))]
    rows = [[number for number in row if number != TEXT_ALONE] for row in samples]
    side = make_batch(images, SIDE, 1, rows, row_length=IMAGE_LENGTH)
    batch = {f"encoder_{field}": values for field, values in side.items()}
    shape = (ROWS, TEXT_LENGTH)
    batch |= {"tokens": torch.zeros(shape, dtype=torch.int64), "targets": torch.full(shape, -100)}
    batch |= {"positions": torch.zeros(shape, dtype=torch.int64), "documents": torch.full(shape, -1)}
    generator = torch.Generator().manual_seed(11)
    for index, row in enumerate(samples):
        begin = 0
        for document, number in enumerate(row):
            n_patches = 0 if number == TEXT_ALONE else SIZES[number][0] * SIZES[number][1]
            n_before, n_after = (index + document) % 3, 1 + (index + 2 * document) % 3
            text = torch.randint(8, VOCABULARY - 8, (n_before + n_after + 1,), generator=generator)
            image = torch.full((n_patches,), image_token)
            sequence = torch.cat([text[:n_before], image, text[n_before:]])
            place = slice(begin, begin + len(sequence) - 1)
            batch["tokens"][index, place] = sequence[:-1]
            batch["targets"][index, place] = torch.where(sequence == image_token, -100, sequence)[1:]
            batch["positions"][index, place] = torch.arange(len(sequence) - 1)
            batch["documents"][index, place] = document
            begin = place.stop
    several = batch["documents"][1] >= 0  # one text with two images
    batch["documents"][1] = torch.where(several, 0, -1)
    batch["positions"][1] = torch.arange(TEXT_LENGTH).where(several, 0)
    return batch | {"keys": torch.arange(ROWS) * 7919 + 3}


@cache
def llava_reference(name: str) -> tuple[dict[str, Tensor], nn.Module, PassThroughObjective, float]:
    """Batch, model with the gradients of one device, objective and loss: once in a process for all that compare."""
    batch = llava_batch(name)
    return batch, *one_device_reference(LLAVA_MODELS[name], batch, PassThroughObjective)
