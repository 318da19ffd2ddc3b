"""Parquet: a record in each row."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import Bad, BadFileError, Record, columns, from_fields

BATCH_ROWS = 256


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The rows of a file, by their numbers from 1. Only the columns that are needed are read."""
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for batch in file.iter_batches(BATCH_ROWS, columns=columns(config.fields, names)):
                batch.validate(full=True)
                for record in batch.to_pylist():
                    row += 1
                    yield from_fields(str(row), record, config.fields, names)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise BadFileError(f"is no whole Parquet file, after row {row} ({_line(error)})") from None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
