"""`--from MODEL`: the config of a run that starts from a model, with its architecture, tokenizer and weights."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm import checkpoint, tokenizers
from megatfm.config import Config, load_config
from megatfm.config.key_migrations import migrate
from megatfm.convert.convert import convert
from megatfm.convert.electra_pair import is_electra_folder, open_folder
from megatfm.convert.hf_checkpoint import is_hf_folder
from megatfm.errors import UsageError
from megatfm.files import NewPaths
from megatfm.tracking.run_directory import run_folder

CONVERTED_DIR = "from"
"""Folder in the run directory for a converted Hugging Face model, with a marker of its path."""
WORLD_SIZE_VARS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RUN_SPECIFIC_KEYS = (
    "run_dir", "data.validation", "data.mixture", "data.mixture_schedule", "data.rampup", "train.init_include",
    "train.branch_from", "train.freeze", "resume", "parallel",
)  # fmt: skip
"""Keys of another run's config that were about that run."""
DATA_KEYS = ("data.train", "data.corpus", "data.mixture")


def continue_from_config(
    source: str | Path, base_config: str | None, overrides: Sequence[str], new_paths: NewPaths | None = None
) -> tuple[Config, Sequence[str]]:
    """Return the config of a run that starts from the model at `source`, and messages for the log.

    base_config: a config or preset, of which the model is replaced; None: the recipe is that of `source`, with other
    text. new_paths: takes note of the folder that a Hugging Face model is converted to, which is removed if the config
    is refused. Raises UsageError, MegatfmError.
    """
    new_paths = new_paths or NewPaths()
    source = Path(source)
    messages: list[str] = []
    name = f"from-{source.absolute().name}"
    overridden_keys = {override.partition("=")[0].strip() for override in overrides}
    if base_config is None and not any(key.startswith(DATA_KEYS) for key in overridden_keys):
        raise UsageError(
            "--from goes on with text of yours: give data.train=CORPUS/train, or data.corpus=CORPUS"
        )
    if is_hf_folder(source) or is_electra_folder(source):
        try:
            folder, messages = _convert_hf_once(source, base_config, [f"name={name}", *overrides], new_paths)
            return _config(folder, base_config, overrides, name), messages
        except UsageError:
            new_paths.remove()
            raise
    return _config(source, base_config, overrides, name), messages


def _config(source: Path, base_config: str | None, overrides: Sequence[str], name: str) -> Config:
    """Return the config of a run that starts from a checkpoint or run of ours."""
    path = checkpoint.find_checkpoint(source)
    folder = path.absolute().parent.parent
    words = [f"train.init_from={path if path == source else folder}"]
    if tokenizer := tokenizers.find_tokenizer_file(folder):
        words.append(f"data.tokenizer={tokenizer}")
    if base_config is None:
        words += [f"{key}=" for key in RUN_SPECIFIC_KEYS] + [f"name={name}"]
        base: str | Path = folder / "config.toml"
        config = load_config(base, [*words, *overrides])
    else:
        config = load_config(base_config, [*words, *overrides], replaced_sections={"model": _model(path)})
    _check_tokenizer(config, tokenizer, source)
    return config


def _convert_hf_once(
    source: Path, base_config: str | None, overrides: Sequence[str], new_paths: NewPaths
) -> tuple[Path, list[str]]:
    """Convert a Hugging Face folder, once: the result is kept in the run directory for when the run is resumed."""
    values = dict(override.partition("=")[::2] for override in overrides)
    if base_config is not None:
        model = open_folder(source).config.model_dump(mode="json")
        words = [f"data.tokenizer={source}", *overrides[1:]]  # a recipe need not name the model's own
        run = run_folder(load_config(base_config, words, replaced_sections={"model": model}))
    else:
        run = Path(values["run_dir"]) if values.get("run_dir") else Path.cwd() / "runs" / values["name"]
    # If the name now means another folder than before, nothing converted earlier may be used.
    target = run / f"{CONVERTED_DIR}-{blake3(os.fsencode(source.absolute())).hexdigest(4)}"
    if (target / "config.toml").is_file():
        return target, []
    if any(os.environ.get(key, "1") not in ("", "1") for key in WORLD_SIZE_VARS):
        raise UsageError(
            f"{source}: is in the Hugging Face format, of which one process makes a folder of ours: run `megatfm "
            f"convert {source} NEW --to megatfm` once, and give --from NEW"
        )
    new_paths.make_folder(run)
    new_paths.trees.append(target.absolute())
    first, *notes = convert(source, target, "megatfm")
    return target, [f"{source}: {first}, kept in {target}", *notes]


def _model(path: Path) -> dict[str, Any]:
    """Return the [model] with which a checkpoint was saved."""
    saved = migrate(checkpoint.read_state(path).get("config"))
    model = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f"{path}: doesn't say which model it holds: go on with the version that wrote it")
    return model


def _check_tokenizer(config: Config, corpus_tokenizer: Path | None, source: Path) -> None:
    """Raise UsageError unless the text was prepared with the tokenizer of the model's training."""
    if corpus_tokenizer is None or config.data.tokenizer is None:
        return
    if tokenizers.load(config.data.tokenizer).hash != tokenizers.load(corpus_tokenizer).hash:
        raise UsageError(
            f"data.tokenizer = {config.data.tokenizer}: not the tokenizer of {source}: prepare the text with that one, "
            f"tokenizer.file={corpus_tokenizer}"
        )
