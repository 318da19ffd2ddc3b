"""Starting configs: of a converted model, and of a run that continues from it."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, LearnedPosition2dConfig, ModelConfig, PatchEmbeddingConfig, make_usage_error

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
