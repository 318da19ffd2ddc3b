"""The `[model.stages]` section: stages of a hierarchical model, each with half the map's side and twice the width."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from megatfm.config.section import MAX_LAYERS, MAX_LENGTH, MAX_WIDTH, Section, find_nearest_divisor

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig
    from megatfm.config.root import Config

IMAGE_OBJECTIVES = ("image_classification", "masked_image", "simmim")
"""Objectives whose images have `data.images.size`."""


class StagesConfig(Section):
    """Depths and heads of stages, and the first stage's map of patches (Liu et al. 2021, section 3.1)."""

    n_layers: tuple[PositiveInt, ...] = Field(examples=[[2, 2, 6, 2]], min_length=1, max_length=MAX_LAYERS)
    """Number of blocks of each stage."""
    n_heads: tuple[PositiveInt, ...] = Field(examples=[[3, 6, 12, 24]], min_length=1, max_length=MAX_LAYERS)
    """Number of attention heads of each stage. Widths begin with `d_model` and double with each stage."""
    grid: tuple[PositiveInt, PositiveInt] = (56, 56)
    """Rows and columns of an image's patches, if the batch has no grid; the default: 224 pixels in patches of 4."""
    merging_norm: Literal["input", "output"] = "input"
    """Norm of patch merging: on the four joined vectors (Swin), or on the reduced one (Swin-V2)."""

    @model_validator(mode="after")
    def _check_stages(self) -> "StagesConfig":
        if len(self.n_heads) != len(self.n_layers):
            raise ValueError(
                f"stages.n_heads has {len(self.n_heads)} numbers and stages.n_layers {len(self.n_layers)}: give one of "
                "each for every stage"
            )
        if max(self.n_heads) > MAX_WIDTH or max(self.grid) > MAX_LENGTH:
            raise ValueError(f"stages.n_heads = {list(self.n_heads)}, stages.grid = {list(self.grid)}: choose smaller")
        return self

    def map_at(self, stage: int, grid: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return rows and columns of the map in a stage; odd sides are padded before they are halved."""
        rows, columns = grid or self.grid
        return -(-rows // 2**stage), -(-columns // 2**stage)

    def stage_at(self, depth: int) -> int:
        """Return the stage of the block at a depth, counted over all stages."""
        return bisect_right(list(accumulate(self.n_layers)), depth)

    def find_changes_at(self, stage: int, model: "ModelConfig") -> dict[str, Any]:
        """Return the changes of a model's config for the blocks of a stage."""
        windows = getattr(model.position, "pretrained_windows", None)
        return {
            "family": "encoder",
            "stages": None,
            "n_layers": self.n_layers[stage],
            "d_model": model.d_model * 2**stage,
            "attention.n_heads": self.n_heads[stage],
            "ffn.d_ff": model.ffn.d_ff * 2**stage,
            **({"position.pretrained_windows": (windows[stage],)} if windows else {}),
        }


def fill_in_stages(values: Any) -> Any:
    """Return a model's values with n_layers and attention.n_heads from its stages, if they are left out."""
    stages = values.get("stages") if isinstance(values, Mapping) else None
    if not isinstance(stages, Mapping | StagesConfig):
        return values
    try:
        section = StagesConfig.model_validate(stages)
    except ValidationError:
        return values  # the validation of model.stages reports it
    filled = {"n_layers": sum(section.n_layers), **values, "stages": section}
    if isinstance(attention := values.get("attention", {}), Mapping):
        filled["attention"] = {"n_heads": section.n_heads[0], **attention}
    return filled


def make_layers_optional(schema: dict[str, Any]) -> None:
    """Make n_layers optional in a model's JSON schema, since stages can set it."""
    schema["required"].remove("n_layers")


def check_stages(model: "ModelConfig") -> None:
    """Raise ValueError if a model's other keys contradict its stages."""
    stages = model.stages
    if model.family == "hierarchical" and stages is None:
        raise ValueError("family = 'hierarchical' needs model.stages: give n_layers and n_heads of each stage")
    if stages is None:
        return
    for key, value, allowed, condition in (
        ("n_layers", model.n_layers, sum(stages.n_layers), "the sum of stages.n_layers"),
        ("attention.n_heads", model.attention.n_heads, stages.n_heads[0], "the first of stages.n_heads"),
    ):
        if value != allowed:
            raise ValueError(f"{key} = {value} is not {condition}, which is {allowed}: leave {key} out")
    if (model.position.name == "relative_axes") and model.attention.name != "pooled":
        raise ValueError("position.name = 'relative_axes' is for attention.name = 'pooled': choose another position")
    for stage, heads in enumerate(stages.n_heads):
        if (width := model.d_model * 2**stage) % heads:
            raise ValueError(
                f"stages.n_heads[{stage}] = {heads} does not divide d_model · 2^{stage} = {width}: choose "
                f"{find_nearest_divisor(width, heads)}"
            )
    windows = getattr(model.position, "pretrained_windows", None)
    if windows and len(windows) != len(stages.n_layers):
        raise ValueError(
            f"position.pretrained_windows = {list(windows)} has {len(windows)} numbers, and there are "
            f"{len(stages.n_layers)} stages: give one for each"
        )
    if getattr(model.embedding, "n_special_tokens", 0):
        raise ValueError("family = 'hierarchical' has no class or register tokens: set embedding.n_class_tokens = 0")
    if model.lm_head.name != "none":
        raise ValueError("family = 'hierarchical' has no head over a vocabulary: set lm_head.name = 'none'")


def check_image_rows(config: "Config") -> None:
    """Raise ValueError unless rows hold complete images of the stages' grid, and divide over ranks in every stage."""
    stages, patch_size = config.model.stages, getattr(config.model.embedding, "patch_size", None)
    if stages is None or patch_size is None:
        return
    side, (rows, columns) = config.data.images.size, stages.grid
    if config.objective.name in IMAGE_OBJECTIVES and (rows, columns) != (side // patch_size, side // patch_size):
        raise ValueError(
            f"model.stages.grid = {list(stages.grid)}: data.images.size = {side} is {side // patch_size} patches of "
            f"{patch_size} pixels a side: set model.stages.grid=[{side // patch_size},{side // patch_size}]"
        )
    length, parallel = config.data.sequence_length, config.parallel
    if parallel.cp > 1:
        raise ValueError(
            f"parallel.cp = {parallel.cp}: family = 'hierarchical' needs whole images on each rank, because windows "
            "and merged patches lie across any cut, and the last map is often a single window: set parallel.cp = 1, "
            "and use parallel.dp_shard, tp or pp"
        )
    if length % (rows * columns):
        raise ValueError(
            f"data.sequence_length = {length} is no multiple of an image of {rows} × {columns} patches: choose "
            f"{max(1, length // (rows * columns)) * rows * columns}"
        )
    images, tp = length // (rows * columns), parallel.tp if parallel.sequence_parallel else 1
    for stage in range(len(stages.n_layers)):
        n_rows, n_columns = stages.map_at(stage)
        if images * n_rows * n_columns % tp:
            next_multiple = next(n for n in range(images, images + tp + 1) if n % tp == 0)
            raise ValueError(
                f"parallel.tp = {tp}: rows of {images} × {n_rows} × {n_columns} tokens in stage {stage} don't divide "
                f"into shards of the sequence: choose data.sequence_length = {next_multiple * rows * columns}, for "
                f"{next_multiple} images a row, or parallel.sequence_parallel=false"
            )
