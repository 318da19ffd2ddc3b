"""A config that goes on from a model: its architecture, its tokenizer and its weights."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import disk
from megatfm.config import Config, load_config
from megatfm.config.key_migrations import migrate
from megatfm.convert.convert import convert
from megatfm.convert.folder import is_hf_folder
from megatfm.convert.pair import is_electra_folder
from megatfm.errors import UsageError
from megatfm.train.record.run_directory import run_folder

CONVERTED_DIR = "from"
"""Where in the run directory a Hugging Face folder is kept in our format, with a mark of its path."""
WORLD_SIZE_VARS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RUN_SPECIFIC_KEYS = (
    "run_dir", "data.validation", "data.mixture", "data.mixture_schedule", "data.rampup", "train.init_include",
    "train.branch_from", "train.freeze", "resume", "parallel",
)  # fmt: skip
"""Keys of another run's config that were about that run."""
DATA_KEYS = ("data.train", "data.corpus", "data.mixture")


def continue_from_config(
    source: str | Path, base_config: str | None, overrides: Sequence[str]
) -> tuple[Config, Sequence[str]]:
    """The config of a run that starts from the model at `source`, and what is to be said.

    base_config: a config or preset, of which the model is replaced; None: the recipe is that of `source`, with other
    text. Raises UsageError, MegatfmError.
    """
    source = Path(source)
    said: list[str] = []
    name = f"from-{source.absolute().name}"
    named = {override.partition("=")[0].strip() for override in overrides}
    if base_config is None and not any(key.startswith(DATA_KEYS) for key in named):
        raise UsageError(
            "--from goes on with text of yours: give data.train=CORPUS/train, or data.corpus=CORPUS"
        )
    if is_hf_folder(source) or is_electra_folder(source):
        with _none_left_behind() as kept:
            ours, said = _convert_hf_once(source, base_config, [f"name={name}", *overrides])
            kept += [ours] * bool(said)
            return _config(ours, base_config, overrides, name), said
    return _config(source, base_config, overrides, name), said


def _config(source: Path, given: str | None, overrides: Sequence[str], name: str) -> Config:
    """The config of a run that starts from a checkpoint or run of ours."""
    found = checkpoint.find_checkpoint(source)
    folder = found.absolute().parent.parent
    words = [f"train.init_from={found if found == source else folder}"]
    if tokenizer := tokenizers.find_tokenizer_file(folder):
        words.append(f"data.tokenizer={tokenizer}")
    if given is None:
        words += [f"{key}=" for key in RUN_SPECIFIC_KEYS] + [f"name={name}"]
        base: str | Path = folder / "config.toml"
        config = load_config(base, [*words, *overrides])
    else:
        config = load_config(given, [*words, *overrides], replaced_sections={"model": _model(found)})
    _check_tokenizer(config, tokenizer, source)
    return config


@contextmanager
def _none_left_behind() -> Iterator[list[Path]]:
    """Remove the folders that were just made, and a run directory with nothing else, where the config is refused."""
    made: list[Path] = []
    try:
        yield made
    except UsageError:
        for folder in made:
            disk.remove_tree(folder)
            with suppress(OSError):
                folder.parent.rmdir()
        raise


def _convert_hf_once(source: Path, given: str | None, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder made of a Hugging Face one, which is kept in the run directory for when the run is resumed."""
    values = dict(override.partition("=")[::2] for override in overrides)
    if given is not None:
        run = run_folder(load_config(given, overrides[1:]))
    else:
        run = Path(values["run_dir"]) if values.get("run_dir") else Path.cwd() / "runs" / values["name"]
    # Of another folder than before, under the same name, nothing that is here may be taken.
    target = run / f"{CONVERTED_DIR}-{blake3(os.fsencode(source.absolute())).hexdigest(4)}"
    if (target / "config.toml").is_file():
        return target, []
    if any(os.environ.get(key, "1") not in ("", "1") for key in WORLD_SIZE_VARS):
        raise UsageError(
            f"{source}: is in the Hugging Face format, of which one process makes a folder of ours: run `megatfm "
            f"convert {source} NEW --to megatfm` once, and give --from NEW"
        )
    first, *notes = convert(source, target, "megatfm")
    return target, [f"{source}: {first}, kept in {target}", *notes]


def _model(found: Path) -> dict[str, Any]:
    """The [model] with which a checkpoint was saved."""
    saved = migrate(checkpoint.read_state(found).get("config"))
    model = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f"{found}: doesn't say which model it holds: go on with the version that wrote it")
    return model


def _check_tokenizer(config: Config, wanted: Path | None, source: Path) -> None:
    """Pretrained rows mean what the tokenizer of their training says. Raises UsageError."""
    if wanted is None or config.data.tokenizer is None:
        return
    if tokenizers.load(config.data.tokenizer).hash != tokenizers.load(wanted).hash:
        raise UsageError(
            f"data.tokenizer = {config.data.tokenizer}: not the tokenizer of {source}: prepare the text with that one, "
            f"tokenizer.file={wanted}"
        )
