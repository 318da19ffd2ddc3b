"""`--from MODEL`: builds the config of a run that starts from a model's architecture, tokenizer and weights."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm import checkpoint, tokenizers
from megatfm.config import Config, load_config
from megatfm.config.key_migrations import migrate
from megatfm.config.load import get_overridden_keys
from megatfm.convert.convert import convert
from megatfm.convert.electra_pair import is_electra_folder, open_folder
from megatfm.convert.hf_checkpoint import is_hf_folder
from megatfm.errors import UsageError
from megatfm.files import NewPaths
from megatfm.parallel.process_environment import read_process_environment

CONVERTED_DIR = "from"
"""Folder in the run directory for a converted Hugging Face model, with a marker of its path."""
RUN_SPECIFIC_KEYS = (
    "run_dir", "data.validation", "data.mixture", "data.mixture_schedule", "data.rampup", "train.init_include",
    "train.branch_from", "train.freeze", "resume", "parallel",
)  # fmt: skip
"""Keys of another run's config that a new run doesn't inherit."""
DATA_KEYS = ("data.train", "data.corpus", "data.mixture")


def continue_from_config(
    source: str | Path, base_config: str | None, overrides: Sequence[str], new_paths: NewPaths | None = None
) -> tuple[Config, Sequence[str]]:
    """Return the config of a run that starts from the model at `source`, and messages for the log.

    base_config: a config or preset whose [model] is replaced; None: the config of `source` itself, for other text.
    new_paths: registers the folder of a converted Hugging Face model, which is removed if the config is refused. Raises
    UsageError, MegatfmError.
    """
    new_paths = new_paths or NewPaths()
    source = Path(source)
    messages: list[str] = []
    name = f"from-{source.absolute().name}"
    if base_config is None and not any(key.startswith(DATA_KEYS) for key in get_overridden_keys(overrides)):
        raise UsageError("--from needs a corpus to train on: give data.train=CORPUS/train, or data.corpus=CORPUS")
    if is_hf_folder(source) or is_electra_folder(source):
        try:
            folder, messages = _convert_hf_once(source, base_config, [f"name={name}", *overrides], new_paths)
            return _make_config(folder, base_config, overrides, name), messages
        except UsageError:
            new_paths.remove()
            raise
    return _make_config(source, base_config, overrides, name), messages


def _make_config(source: Path, base_config: str | None, overrides: Sequence[str], name: str) -> Config:
    """Return the config of a run that starts from a megatfm run or checkpoint."""
    path = checkpoint.find_checkpoint(source)
    folder = path.absolute().parent.parent
    defaults = [f"train.init_from={path if path == source else folder}"]
    if tokenizer := tokenizers.find_tokenizer_file(folder):
        defaults.append(f"data.tokenizer={tokenizer}")
    if base_config is None:
        defaults += [f"{key}=" for key in RUN_SPECIFIC_KEYS] + [f"name={name}"]
        config = load_config(folder / "config.toml", [*defaults, *overrides])
    else:
        sections = {"model": _read_model_section(path)}
        config = load_config(base_config, [*defaults, *overrides], replaced_sections=sections)
    _check_tokenizer(config, tokenizer, source)
    return config


def _convert_hf_once(
    source: Path, base_config: str | None, overrides: Sequence[str], new_paths: NewPaths
) -> tuple[Path, list[str]]:
    """Convert a Hugging Face folder into the run directory, unless this has been done; return folder and messages."""
    values = dict(override.partition("=")[::2] for override in overrides)
    if base_config is not None:
        model = open_folder(source).config.model_dump(mode="json")
        with_tokenizer = [f"data.tokenizer={source}", *overrides[1:]]  # presets need not name a tokenizer
        run = load_config(base_config, with_tokenizer, replaced_sections={"model": model}).run_folder
    else:
        run = Path(values["run_dir"]) if values.get("run_dir") else Path.cwd() / "runs" / values["name"]
    # The name contains a hash of the source's path, so that a model converted from another folder is not used.
    target = run / f"{CONVERTED_DIR}-{blake3(os.fsencode(source.absolute())).hexdigest(4)}"
    if (target / "config.toml").is_file():
        return target, []
    if read_process_environment(os.environ).world_size > 1:
        raise UsageError(
            f"{source}: is in the Hugging Face format, which one process must convert first: run `megatfm convert "
            f"{source} NEW --to megatfm` once, and give --from NEW"
        )
    new_paths.make_folder(run)
    new_paths.trees.append(target.absolute())
    summary, *notes = convert(source, target, "megatfm")
    return target, [f"{source}: {summary}, stored in {target}", *notes]


def _read_model_section(path: Path) -> dict[str, Any]:
    """Return the [model] section of a checkpoint's config."""
    saved = migrate(checkpoint.read_state(path).get("config"))
    model = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f"{path}: doesn't describe its model: continue with the version that wrote it")
    return model


def _check_tokenizer(config: Config, corpus_tokenizer: Path | None, source: Path) -> None:
    """Raise UsageError if the corpus was prepared with another tokenizer than the model's."""
    if corpus_tokenizer is None or config.data.tokenizer is None:
        return
    if tokenizers.load(config.data.tokenizer).hash != tokenizers.load(corpus_tokenizer).hash:
        raise UsageError(
            f"data.tokenizer = {config.data.tokenizer}: not the tokenizer of {source}: prepare the text with that one, "
            f"tokenizer.file={corpus_tokenizer}"
        )
