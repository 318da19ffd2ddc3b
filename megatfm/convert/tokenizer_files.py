"""The tokenizer's files, beside the weights in both formats."""

from pathlib import Path
from typing import Any

from megatfm import tokenizers
from megatfm.checkpoint import disk
from megatfm.config import Config
from megatfm.errors import MegatfmError

MODELS = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
"""Files that hold a whole tokenizer, the best first."""
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""Files that say more about it; config.json's are made anew."""


def to_hf(checkpoint: Path, config: Config, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Copy the tokenizer of a run, or of a checkpoint's config; returns notes, and keys of config.json."""
    run = checkpoint.absolute().parent.parent
    name = Path(config.data.tokenizer).name
    place = next((path for path in (run / name, Path(config.data.tokenizer)) if path.is_file()), None)
    if place is None:
        return [f"no tokenizer: there is none at {run / name} or {config.data.tokenizer}"], {}
    _copy(place.parent, folder, [place.name, *BESIDE])
    opened = tokenizers.load(place)
    return [], {
        "bos_token_id": opened.bos,
        "eos_token_id": opened.eos,
        "pad_token_id": opened.pad,
    }


def to_megatfm(source: Path, folder: Path) -> tuple[str | None, list[str]]:
    """Copy the tokenizer of a folder in the Hugging Face format; returns its file's name, and notes."""
    name = next((name for name in MODELS if (source / name).is_file()), None)
    if name is None:
        return None, [f"no tokenizer: {source} has none of {', '.join(MODELS)}"]
    try:
        tokenizers.load(source / name)
    except MegatfmError as error:
        return None, [f"no tokenizer: {error}"]
    _copy(source, folder, [name, *BESIDE])
    return name, []


def _copy(source: Path, target: Path, names: list[str]) -> None:
    for name in names:
        if (source / name).is_file():
            disk.write_file(target / name, [memoryview(disk.read_file((source / name).resolve()))])
