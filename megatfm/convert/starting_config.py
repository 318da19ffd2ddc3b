"""Starting configs: of a converted model, with images prepared as its preprocessor_config.json says, and of a run that
continues from it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, LearnedPosition2dConfig, ModelConfig, PatchEmbeddingConfig, make_usage_error
from megatfm.config.data import ImagesConfig
from megatfm.convert.hf_checkpoint import PREPROCESSOR, read_json_object, write_json
from megatfm.convert.hf_config import Json
from megatfm.convert.hf_values import PIXEL_KEYS

OBJECTIVES = {
    "decoder": "causal",
    "encoder": "masked",
    "encoder_decoder": "span_corruption",
    "xlnet": "permutation",
    "electra": "replaced_token",
    "discriminator": "replaced_token",
    "hierarchical": "image_classification",
    "vision_language": "image_to_text",
}
"""Family → default objective."""
DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens per row if config.json has no length."""
TEXT_LENGTH = 256
"""Tokens of text per row besides an image's."""


def make_starting_config(target: Path, model: ModelConfig, tokenizer: str | None, length: int | None) -> Config:
    """Build the config of a converted model. tokenizer: file name in `target`. length: tokens per row."""
    target = target.absolute()
    values: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", target.name).lstrip("._-")[:100] or "converted",
        "model": model,
        "objective": {"name": OBJECTIVES.get(model.family, "causal")},
        "data": {
            "train": str(target / "corpus" / "train"),
            "tokenizer": str(target / (tokenizer or "tokenizer.model")),
            "sequence_length": length or DEFAULT_SEQUENCE_LENGTH,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "train": {"steps": 1000, "global_batch": 32, "micro_batch": 1, "init_from": str(target)},
    }
    if model.stages is not None:
        (rows, columns), patch_size = model.stages.grid, getattr(model.embedding, "patch_size", 1)
        values["data"] |= {"sequence_length": rows * columns, "images": {"size": rows * patch_size}}
    return _validate(values | _make_image_sections(values["data"], model), target)


def _make_image_sections(data: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the objective and data sections of an image model, with images as large as its position table."""
    if (tower := model.vision_tower) is not None:
        n_patches, size = max(tower.grid) ** 2, max(tower.grid) * tower.embedding.patch_size
        lengths = {
            "sequence_length": tower.embedding.n_special_tokens + n_patches,
            "target_length": n_patches + TEXT_LENGTH,
        }
        return {"data": {**data, **lengths, "images": {"size": size}}}
    embedding, position = model.embedding, model.position
    if not isinstance(embedding, PatchEmbeddingConfig) or not isinstance(position, LearnedPosition2dConfig):
        return {}
    side = max(position.grid)
    length = embedding.n_special_tokens + side**2
    images = {"size": side * embedding.patch_size}
    data_config = {"train": data["train"], "sequence_length": length, "images": images}
    return {"objective": {"name": "image_classification"}, "data": data_config}


def make_branching_config(config: Config, target: Path, step: int) -> Config:
    """Build a config that continues from a checkpoint with its optimizer state, on other data."""
    values = config.model_dump(mode="json")
    values["train"] |= {"init_from": None, "branch_from": f"{target.absolute()}@{step}", "steps": step + 1000}
    values["resume"] |= {"allow": ["data", "tokenizer", "seed", "schedule", "optimizer", "batch"]}
    return _validate(values, target)


def _validate(values: dict[str, Any], target: Path) -> Config:
    """Validate a config. Raises UsageError for invalid values of the source, such as −1 tokens per row."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise make_usage_error(f"{target}: the converted model has no valid config", error) from None


FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
"""data.images.interpolation → `resample`, the number of Pillow's filter."""


def read_preprocessor(folder: Path) -> Json:
    """Return the content of a folder's preprocessor_config.json, nothing without one. Raises MegatfmError."""
    return read_json_object(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else {}


def adopt_image_options(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Return a config that prepares images as a Hugging Face folder does, and notes where it can't.

    Raises MegatfmError for a damaged file.
    """
    options, notes = _parse_options(read_preprocessor(folder), config.data.images.size)
    changes = {f"data.images.{key}": value for key, value in options.items()}
    return config.with_changes(changes) if changes else config, [f"{PREPROCESSOR}: {note}" for note in notes]


def _parse_options(values: Mapping[str, Any], size: int) -> tuple[Json, list[str]]:
    """Return keys of `data.images` and notes. size: side of the model's images in pixels."""
    options, notes = Json(), list[str]()
    if "resample" in values:
        name = next((name for name, number in FILTERS.items() if number == values["resample"]), None)
        if name is not None:
            options["interpolation"] = name
        else:
            notes.append(f"resample = {values['resample']} is none of megatfm's filters: see data.images.interpolation")
    stored = values.get("size")
    sides = stored if isinstance(stored, dict) else {"shortest_edge": stored}
    shorter, crops = sides.get("shortest_edge") or sides.get("height"), bool(values.get("do_center_crop"))
    if values.get("do_resize") is False or not isinstance(shorter, int) or shorter < 1:
        return options, notes
    crop_size = values.get("crop_size", shorter) if crops else shorter
    crop_side = crop_size.get("height", shorter) if isinstance(crop_size, dict) else crop_size
    if isinstance(crop_side, int) and 0 < crop_side <= shorter:
        options["crop_pct"] = _compute_crop_pct(size, round(size * shorter / crop_side))
    if "height" in sides or not crops:
        notes.append(
            "transformers stretches images to a square, and megatfm crops them, to other pixels unless they are square"
        )
    if crop_side != size:
        notes.append(f"transformers' images have {crop_side} pixels a side, and data.images.size is {size}")
    return options, notes


def _compute_crop_pct(size: int, resized: int) -> float:
    """Return the share by which `size` pixels are cropped out of `resized`: size / crop_pct, cut, is `resized`."""
    crop_pct = size / resized
    while int(size / crop_pct) < resized:
        crop_pct = math.nextafter(crop_pct, 0)
    return crop_pct


def write_preprocessor(
    folder: Path, hf_config: dict[str, Any], images: ImagesConfig, stored: Mapping[str, Any] | None
) -> list[str]:
    """Move mean and standard deviation of pixels, if there are any, from `hf_config` to preprocessor_config.json.

    images: how the run prepares an image in evaluation, which is written, too. stored: the file that the model came
    with, which is written again if the run still does what it says. Returns notes for the user.
    """
    pixels = {key: hf_config.pop(key) for key in PIXEL_KEYS if key in hf_config}
    if not pixels:
        return []
    side = hf_config.get("vision_config", hf_config)["image_size"]
    options, _ = _parse_options(stored or {}, side)
    if stored and "crop_pct" in options and all(getattr(images, key) == value for key, value in options.items()):
        write_json(folder / PREPROCESSOR, {**stored, **pixels})
        return []
    prepared = {
        "do_convert_rgb": len(pixels["image_mean"]) == 3,
        "do_resize": True,
        "size": {"shortest_edge": int(side / images.crop_pct)},
        "resample": FILTERS[images.interpolation],
        "do_center_crop": True,
        "crop_size": dict.fromkeys(("height", "width"), side),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    write_json(folder / PREPROCESSOR, {"image_processor_type": "CLIPImageProcessor", **prepared, **pixels})
    is_native = images.max_patches is not None
    return ["data.images.max_patches: transformers crops images to one size, which keep their shape here"] * is_native
