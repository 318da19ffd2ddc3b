"""Small vision-language models and their batches, whose gradients layouts must reproduce."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from tests.support.batches import PassThroughObjective
from tests.support.images import draw_pixels, make_batch
from tests.support.layouts import make_cases_by_ranks
from tests.support.models import ROWS
from tests.support.parity import one_device_reference

SIDE, IMAGE_TOKEN, VOCABULARY = 4, 55, 60
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
TEXT_LENGTH, IMAGE_LENGTH = 24, 18
"""Lengths of the two sides of a row."""
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
LAYOUTS = {
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
CASES = make_cases_by_ranks(
    LLAVA_MODELS, LAYOUTS, always=["one process", "cp"],
    extended={2: ["zero 0", "zero 2", "replicas", "gpipe", "interleaved", "dualpipev"],
              3: ["tp without sequence parallelism", "pp"],
              4: ["pp × zero 1", "replicas × zero 3", "cp × zero 3", "tp × zero 3"], 5: ["cp"]},
)  # fmt: skip
"""Cells of the grid of models and layouts; those of later tiers are marked."""
SIZES = [(1, 3), (2, 2), (3, 2), (2, 3), (1, 1)]
"""Heights and widths of images, in patches."""
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
