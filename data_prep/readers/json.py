"""A JSON array: a record in each element. It is held in memory as a whole; JSON lines have no limit."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    Bad,
    BadFileError,
    Record,
    opened,
    record_from_dict,
)


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The elements of an array, by their numbers from 1."""
    with opened(path) as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        raise BadFileError(
            f"is an array of over {MAX_RECORD_BYTES:,} bytes: make JSON lines of it (jq -c '.[]' a.json > a.jsonl)"
        )
    try:
        elements = json.loads(data)
    except (ValueError, RecursionError):
        raise BadFileError("is not JSON") from None
    if not isinstance(elements, list):
        raise BadFileError("is no array of records")
    for number, element in enumerate(elements, 1):
        yield record_from_dict(str(number), element, config.fields)
