"""Names of the corpora of a split: there may be one for each value of a field."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatfm import tokenizers
from megatfm.data.files import disk_errors_as_megatfm_errors
from megatfm.data.manifest import INDEX_NAME, MANIFEST, SHARD_NAME

_OF_CORPORA = re.compile(rf"\.?({SHARD_NAME}|{INDEX_NAME}|{re.escape(MANIFEST)})(\.partial)?")

OTHER = "other"


def folder_name(value: str) -> str:
    """A value as the name of a folder: what a path can't have, or would hide, is spelled `%2F`."""
    name = quote(value, safe=" +,;=@()'")[:200]
    return f"%2E{name[1:]}" if name.startswith(".") else name


def corpus_folders(result: Mapping[str, Any], split: str) -> list[str]:
    """The folders, below `out`, of a split's corpora."""
    found = result[split]
    if not found["shards"]:
        return []
    return [f"{split}/{name}" for name in found["corpora"]] if "corpora" in found else [split]


def remove_unlisted(out: Path, result: Mapping[str, Any]) -> None:
    """Remove files of corpora that `result` doesn't list, and a tokenizer if it has none: they are of a preparation
    that was interrupted and went on with other settings. Files by other names stay."""
    with disk_errors_as_megatfm_errors(out):
        for split in ("train", "validation"):
            listed = {out / name for name in corpus_folders(result, split)}
            folders = [path for path in (out / split).rglob("*") if path.is_dir() and not path.is_symlink()]
            for folder in [*sorted(folders, reverse=True), out / split]:
                if folder in listed or not folder.is_dir():
                    continue
                for path in folder.iterdir():
                    if _OF_CORPORA.fullmatch(path.name) and not path.is_dir():
                        path.unlink()
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
        if result["tokenizer"]["kind"] == "none":
            for name in tokenizers.TOKENIZER_FILENAMES:
                (out / name).unlink(missing_ok=True)
