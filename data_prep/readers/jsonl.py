"""JSON lines: a record in each line, plain or under gzip, bzip2 or zstd."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    Bad,
    BadFileError,
    Record,
    opened,
    record_from_dict,
)
from megatfm.errors import MegatfmError


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The records of a file, by the numbers of their lines."""
    for number, line in _lines(path):
        key = str(number)
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            yield Bad(key, f"is not valid UTF-8: byte {error.start} of its line")
            continue
        except (ValueError, RecursionError):
            yield Bad(key, "is not JSON")
            continue
        yield record_from_dict(key, record, config.fields)


def records(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of each line; a MegatfmError for what can't be read."""
    try:
        for number, line in _lines(path):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                raise BadFileError(f"line {number} is not JSON") from None
    except BadFileError as error:
        raise MegatfmError(f"{path}: {error}: mend it or leave it out") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold anything, with their numbers from 1."""
    number = 0
    with opened(path) as file:
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES:
                raise BadFileError(f"line {number} is longer than {MAX_RECORD_BYTES:,} bytes")
            if line.strip():
                yield number, line
