"""Names of the corpora of a split: there may be one for each value of a field."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

OTHER = "other"


def folder_name(value: str) -> str:
    """A value as the name of a folder: what a path can't have, or would hide, is spelled `%2F`."""
    name = quote(value, safe=" +,;=@()'")[:200]
    return f"%2E{name[1:]}" if name.startswith(".") else name


def corpora(result: Mapping[str, Any], split: str) -> list[str]:
    """The folders, below `out`, of a split's corpora."""
    found = result[split]
    if not found["shards"]:
        return []
    return [f"{split}/{name}" for name in found["corpora"]] if "corpora" in found else [split]
