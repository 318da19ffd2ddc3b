"""preprocessor_config.json: how transformers prepares an image, and the keys of `data.images` that do the same."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm.config import Config
from megatfm.config.images import ImagesConfig
from megatfm.convert.hf_checkpoint import PREPROCESSOR, read_json_object, write_json
from megatfm.convert.hf_config import Json
from megatfm.convert.hf_values import PIXEL_KEYS

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
        filter_by_number = {number: name for name, number in FILTERS.items()}
        if values["resample"] in filter_by_number:
            options["interpolation"] = filter_by_number[values["resample"]]
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
