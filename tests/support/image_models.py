"""Small models of images, their batches, and the layouts that must reproduce their gradients."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from tests.support.batches import PassThroughObjective
from tests.support.images import draw_pixels, make_batch, make_masked_batch
from tests.support.layouts import make_cases
from tests.support.models import LENGTH, PYRAMID_OPTIONS, ROWS, SWIN_MODEL
from tests.support.parity import one_device_reference

SIDE = 4
COMMON: dict[str, Any] = {
    "family": "encoder", "d_model": 24, "n_layers": 2, "attention.n_heads": 6, "attention.bias": True, "ffn.d_ff": 36,
    "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "embedding.name": "patches",
    "embedding.patch_size": SIDE, "position.name": "learned_2d", "position.grid": (2, 3), "layer_scale": 0.3,
    "lm_head.name": "none",
}  # fmt: skip
HEAD = {"extra_heads.classifier.n_classes": 5}
IMAGE_MODELS = {
    "class": ModelConfig.from_dotted(COMMON | HEAD | {"embedding.n_register_tokens": 1, "drop_path": 0.4}),
    "mean": ModelConfig.from_dotted(
        COMMON | HEAD | {"extra_heads.classifier.pool": "class_mean", "extra_heads.classifier.hidden": True}
    ),
    "attention": ModelConfig.from_dotted(
        COMMON | HEAD | {"extra_heads.classifier.pool": "attention", "embedding.n_class_tokens": 0}
    ),
    "rotary": ModelConfig.from_dotted(
        {key: value for key, value in COMMON.items() if key != "position.grid"}
        | HEAD
        | {"position.name": "rope_2d", "attention.key_bias": False, "extra_heads.classifier.pool": "mean"}
    ),
    "mae": ModelConfig.from_dotted(
        COMMON | {"family": "masked_autoencoder", "drop_path": 0.4, "pixel_decoder.d_model": 12,
                  "pixel_decoder.n_layers": 2, "pixel_decoder.n_heads": 6, "pixel_decoder.d_ff": 24}
    ),
    "simmim": ModelConfig.from_dotted(
        COMMON | {"embedding.mask_token": True, "extra_heads": {"pixels": {"name": "pixels", "stride": SIDE}}}
    ),
    "simmim swin": ModelConfig.from_dotted(
        SWIN_MODEL | PYRAMID_OPTIONS
        | {"stages.grid": (4, 6), "stages.n_heads": (6, 12), "d_model": 24, "ffn.d_ff": 36,
           "embedding": SWIN_MODEL["embedding"] | {"mask_token": True},
           "extra_heads.classifier": {"n_classes": 5, "pool": "mean"},
           "extra_heads.pixels": {"name": "pixels", "stride": 2 * SIDE}}
    ),
}  # fmt: skip
SIZES = [(1, 3), (2, 2), (3, 2), (2, 3), (1, 1)]
"""Heights and widths in patches; two of any fit a row but for the padding."""


class ImageObjective(PassThroughObjective):
    """Counts labels of images, and masked patches."""

    def _counted(self, name: str, batch: Any) -> Tensor:
        if name == "reconstruction":
            return (batch["source"] < 0) & (batch["documents"] >= 0)
        return super()._counted(name, batch)


def image_model_batch(name: str) -> dict[str, Tensor]:
    """ROWS rows of LENGTH tokens: images of unlike sizes, one row of one image, and padding."""
    config, n = IMAGE_MODELS[name], len(SIZES)
    images = [draw_pixels(SIDE * height, SIDE * width, seed=seed) for seed, (height, width) in enumerate(SIZES)]
    if name == "mae":
        rows = [[row % n, (row + 1) % n] if row % n not in (1, 2) else [row % n] for row in range(ROWS)]
        visible = [[0, 2], [1, 3], [0, 3, 5], [2, 4], [0]]
        batch = make_masked_batch(images, SIDE, 1, rows, visible, (LENGTH, LENGTH))
    elif name == "simmim swin":
        images = [draw_pixels(4 * SIDE, 6 * SIDE, seed=seed) for seed in range(5)]
        rows = [[row % 5, (row + 2) % 5][: 1 + (row < ROWS - 1)] for row in range(ROWS)]
        batch = mask_patches(make_batch(images, SIDE, 0, rows, labels=[4, 0, 2, 1, 3], row_length=48))
    elif name == "simmim":
        rows = [[row % n, 4] if row % n in (2, 3) else [row % n, 0] for row in range(ROWS)]
        batch = mask_patches(make_batch(images, SIDE, 1, rows, row_length=LENGTH))
    else:
        n_special = config.embedding.n_special_tokens  # type: ignore[union-attr]
        rows = [[row % n, 4] if row % n in (2, 3) else [row % n, 0] for row in range(ROWS)]
        batch = make_batch(images, SIDE, n_special, rows, labels=[4, 0, 2, 1, 3], row_length=LENGTH)
    batch["keys"] = torch.arange(ROWS) * 7919 + 3
    return batch


def mask_patches(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mask every third patch, never padding, and make the patches' pixels targets."""
    is_patch = (batch["grid"][..., 0] >= 0) & (batch["documents"] >= 0)
    masked = is_patch & (torch.arange(is_patch.numel()).view(is_patch.shape) % 3 == 0)
    visible = batch["patches"].masked_fill(masked[..., None], 0)
    return {**batch, "patches": visible, "masked": masked.to(torch.uint8), "target_patches": batch["patches"]}


LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {"tp2": ParallelConfig(tp=2), "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero1": ParallelConfig(dp_shard=2, zero=1), "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2), "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
        "cp2": ParallelConfig(cp=2, zero=0), "pp2": ParallelConfig(pp=2),
        "gpipe": ParallelConfig(pp=2, pp_schedule="gpipe"),
        "interleaved": ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=2),
        "interleaved zero bubble": ParallelConfig(pp=2, pp_schedule="interleaved-zero-bubble"),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "dualpipev": ParallelConfig(pp=2, pp_schedule="dualpipev")},
    3: {"tp3 without sequence parallel": ParallelConfig(tp=3, sequence_parallel=False), "tp3": ParallelConfig(tp=3),
        "zero3 on 3": ParallelConfig(dp_shard=3), "pp3": ParallelConfig(pp=3), "cp3": ParallelConfig(cp=3, zero=0)},
    4: {"tp2 × cp2": ParallelConfig(tp=2, cp=2), "hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1), "pp2 × tp2": ParallelConfig(pp=2, tp=2),
        "pp2 × zero1": ParallelConfig(pp=2, dp_shard=2, zero=1),
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2), "pp2 × replicas": ParallelConfig(pp=2, dp_replicate=2)},
    5: {"zero0 on 5": ParallelConfig(dp_shard=5, zero=0), "cp5": ParallelConfig(cp=5, zero=0)},
}  # fmt: skip
WITHOUT_CONTEXT = ("simmim swin",)
"""Models whose parts need whole rows."""


def is_compared(name: str, parallel: ParallelConfig) -> bool:
    """Return whether this model's gradients are compared under this layout."""
    return parallel.cp == 1 or name not in WITHOUT_CONTEXT


def list_model_layouts(ranks: int) -> dict[str, list[str]]:
    """Models and the layouts of so many ranks under which they are compared."""
    layouts = LAYOUTS[ranks].items()
    compared = {name: [key for key, value in layouts if is_compared(name, value)] for name in IMAGE_MODELS}
    return {name: keys for name, keys in compared.items() if keys}


ALWAYS = ["one process", "cp2", "tp2", "tp3", "tp3 without sequence parallel"]
"""Layouts that no model goes without: a masked autoencoder's lookup can be wrong under some of these alone."""
LONGER = {
    1: ["mean", "attention", "rotary", "simmim"],
    2: ["zero0", "zero2", "replicas", "gpipe", "interleaved", "dualpipev"],
    3: ["class", "mean", "attention", "simmim", "zero3 on 3", "pp3", "cp3"],
    4: ["attention", "rotary", "pp2 × zero1", "pp2 × replicas"],
    5: ["class", "mean", "rotary", "mae", "simmim swin", "zero0 on 5"],
}
"""Models and layouts of extended cases: `make test` has these models and axes on other numbers of ranks."""
CASES = [
    case
    for ranks in LAYOUTS
    for case in make_cases(
        list_model_layouts(ranks), ranks, always=ALWAYS, extended=LONGER.get(ranks, ()), label=f" on {ranks}"
    )
]


@cache
def image_reference(name: str) -> tuple[dict[str, Tensor], nn.Module, PassThroughObjective, float]:
    """Batch, model with the gradients of one device, objective and loss: once in a process for all that compare."""
    batch = image_model_batch(name)
    return batch, *one_device_reference(IMAGE_MODELS[name], batch, ImageObjective)
