"""The config of a converted model: its architecture is known, the rest is a place to start from."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, ModelConfig, invalid

OBJECTIVES = {
    "decoder": "causal",
    "encoder": "masked",
    "encoder_decoder": "span_corruption",
    "xlnet": "permutation",
    "electra": "replaced_token",
    "discriminator": "replaced_token",
}
"""What each family is usually trained for."""
DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens a row where config.json doesn't say how long the model's sequences are."""


def starting_config(target: Path, model: ModelConfig, tokenizer: str | None, length: int | None) -> Config:
    """tokenizer: its file in `target`. length: tokens a row."""
    target = target.absolute()
    values = {
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
    return _checked(values, target)


def branching_config(config: Config, target: Path, step: int) -> Config:
    """One that goes on from a checkpoint with the state of its optimizer, and with data of its own."""
    values = config.model_dump(mode="json")
    values["train"] |= {
        "init_from": None,
        "branch_from": f"{target.absolute()}@{step}",
        "steps": step + 1000,
    }
    values["resume"] |= {"allow": ["data", "tokenizer", "seed", "schedule", "optimizer", "batch"]}
    return _checked(values, target)


def _checked(values: dict[str, Any], target: Path) -> Config:
    """Raises UsageError for what the converted files say, but no config can hold, such as rows of −1 tokens."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise invalid(f"{target}: no config can be made for what is converted", error) from None


UNTRAINABLE = {
    "discriminator": "no objective trains a discriminator without its generator: convert a folder with both, as "
    "FOLDER/generator and FOLDER/discriminator, or add a head (model.extra_heads) with an objective of its own"
}
"""Families that no objective of ours trains, and what to do."""


def config_comment(
    name: str, how: str = "--from THIS_FOLDER data.train=CORPUS/train", family: str = ""
) -> str:
    """What stands at the top of config.toml; how: what `megatfm train` is to be told to go on."""
    if family in UNTRAINABLE:
        made = f"# Made by `megatfm convert` from a {name}. [model] is what was converted."
        return f"{made}\n# {UNTRAINABLE[family]}.\n\n"
    return (
        f"# Made by `megatfm convert` from a {name}. [model] is what was converted, the rest a place to start: train\n"
        f"# on from its weights with `megatfm train {how}`.\n\n"
    )
