"""Find the checkpoint that a user's path stands for. Errors say what the path holds instead, and the way out."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from megatfm.checkpoint.directory import check_checkpoint, find_latest, name_checkpoint
from megatfm.checkpoint.metadata import METADATA_FILENAME
from megatfm.checkpoint.reader import read_state
from megatfm.errors import MegatfmError, UsageError

log = logging.getLogger("megatfm")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Owner and name, as the Hugging Face Hub names a model."""
FOREIGN_FILES = {
    "latest_checkpointed_iteration.txt": "Megatron-LM",
    "common.pt": "Megatron-LM",
    "mp_rank_*/model_optim_rng.pt": "Megatron-LM",
    "checkpoint_metadata.json": "nanotron",
    "*.distcp": "torch.distributed.checkpoint (torchtitan, OLMo-core)",
    "model_and_optim/*.distcp": "OLMo-core",
}
"""Files, by pattern, that only another framework's checkpoints have → the framework."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of a folder in PEFT's format, which holds an adapter and not its model."""


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest intact one of a run directory.

    Raises UsageError if there is none.
    """
    path = Path(path)
    refuse_foreign_checkpoint(path)
    if (path / METADATA_FILENAME).is_file():
        return path
    newest = find_latest(path / "checkpoints") if path.is_dir() else None
    if newest is not None:
        return newest
    refuse_adapter(path)
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path} is in the Hugging Face format: convert it with `megatfm convert {path} NEW --to megatfm`"
        )
    if (path / "launch.json").is_file():
        raise UsageError(f"{path}: the run has saved no checkpoint yet: `megatfm status {path}` says how far it is")
    if path.exists():
        raise UsageError(
            f"{path} is neither a checkpoint nor a run directory with one: give a folder that megatfm wrote"
        )
    hint = ""
    if HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        hint = f", or fetch it, if it is a model on the Hugging Face Hub: `hf download {path} --local-dir {path.name}`"
    raise UsageError(f"{path}: there is no such folder: give one with a run or checkpoint{hint}")


def find_best_checkpoint(run_dir: str | Path) -> Path:
    """Return a run's best checkpoint if it has recorded one that is intact, else its newest one.

    The path of a checkpoint is returned unchanged. Raises UsageError if there is no checkpoint, MegatfmError
    if its record of the best one is damaged.
    """
    newest = find_checkpoint(run_dir)
    if newest == Path(run_dir):
        return newest
    best = read_state(newest).get("best")
    if isinstance(best, Mapping):
        step = best.get("step")
        if type(step) is not int:
            raise MegatfmError(f"{newest}: damaged: the step of the best checkpoint is {step!r:.40}")
        path = newest.with_name(name_checkpoint(step))
        if path.is_dir() and check_checkpoint(path) is None:
            return path
        text = "%s: the best checkpoint, of step %d, is not here or not intact: %s is used"
        log.warning(text, run_dir, step, newest.name)
    return newest


def refuse_foreign_checkpoint(path: Path) -> None:
    """Raise UsageError for a checkpoint in another framework's format, with the way by which its weights come here."""
    for pattern, framework in FOREIGN_FILES.items():
        if any(path.glob(pattern)):
            raise UsageError(
                f"{path} is a checkpoint of {framework}, which is not read: export it there to the Hugging Face "
                "format, then use `megatfm convert FOLDER NEW --to megatfm`"
            )


def is_peft_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter in PEFT's format."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def refuse_adapter(path: Path) -> None:
    """Raise UsageError for a folder with an adapter in PEFT's format, whose base model is in another folder."""
    if is_peft_folder(path):
        base = read_adapter_base(path)
        raise UsageError(
            f"{path}: holds an adapter in PEFT's format, and not its model{f', {base}' if base else ''}: join them, "
            f"`megatfm convert {path} NEW --to megatfm --base BASE`, and give NEW; {describe_base(base)}"
        )


def read_adapter_base(path: Path) -> str | None:
    """Return the base model that an adapter's folder names: a path, or a name on the Hugging Face Hub."""
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) else None


def describe_base(base: str | None) -> str:
    """Return a sentence that says what the folder BASE, an adapter's base model, is, and how to get it."""
    if base is None:
        return "BASE is the Hugging Face folder of its model, which adapter_config.json doesn't name"
    if (Path(base) / METADATA_FILENAME).is_file() or (Path(base) / "checkpoints").is_dir():
        return f"BASE comes from `megatfm convert {base} BASE --to hf`"
    if HUB_NAME.fullmatch(base) and not Path(base).parent.exists():
        return f"BASE is the folder of {base}, which `hf download {base} --local-dir BASE` fetches"
    return f"BASE is the Hugging Face folder of {base}"
