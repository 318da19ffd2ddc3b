"""Tables of cells, with the names of the columns in the first row: a record in each other row."""

import csv
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
    """The rows of a file, by their numbers from 1; cells stand between tabs if its name says so, else between commas
    (RFC 4180)."""
    csv.field_size_limit(MAX_RECORD_BYTES)  # for the whole process, as the library has it
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    with opened(path) as file:
        lines = _lines(iter(lambda: file.readline(MAX_RECORD_BYTES + 1), b""))
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        row = 0
        try:
            names = next(rows, [])
            for row, cells in enumerate(rows, 1):
                if not cells:
                    continue
                if len(cells) != len(names):
                    yield Bad(str(row), f"has {len(cells)} cells, where the first row has {len(names)}")
                else:
                    yield record_from_dict(str(row), dict(zip(names, cells, strict=True)), config.fields)
        except csv.Error as error:
            raise BadFileError(f"is damaged after row {row} ({error})") from None


def _lines(lines: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_RECORD_BYTES:
            raise BadFileError(f"line {number} is longer than {MAX_RECORD_BYTES:,} bytes")
        if b"\0" in line:
            raise BadFileError(f"is a binary file, with a zero in line {number}")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(f"is not valid UTF-8: byte {error.start} of line {number}") from None
