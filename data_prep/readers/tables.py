"""Tables of CSV, Arrow and Parquet: a record in each row."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import compute, parquet

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    BadFileError,
    BadRecord,
    Record,
    open_decompressed,
    record_from_dict,
    select_columns,
)
from megatfm.data_prep.readers.text import number_lines


def read_csv(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Read a CSV file: a record for each row after the header, numbered from 1.

    Cells are separated by tabs in a `.tsv`, else by commas (RFC 4180).
    """
    csv.field_size_limit(MAX_RECORD_BYTES)  # for the whole process, as the library has it
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    with open_decompressed(path) as file:
        rows = csv.reader(_decode_lines(file), delimiter=delimiter, strict=True)
        row = 0
        try:
            names = next(rows, [])
            select_columns(config, names)
            for row, cells in enumerate(rows, 1):
                if not cells:
                    continue
                if len(cells) != len(names):
                    counts = f"{len(cells)}, not {len(names)}"
                    yield BadRecord(str(row), f"has another number of cells than the first row: {counts}")
                else:
                    yield record_from_dict(str(row), dict(zip(names, cells, strict=True)), config)
        except csv.Error as error:
            raise BadFileError(f"is damaged after row {row} ({error})") from None


def _decode_lines(file: IO[bytes]) -> Iterator[str]:
    for number, line in number_lines(file):
        if b"\0" in line:
            raise BadFileError(f"is a binary file, with a zero in line {number}")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadFileError(f"is not valid UTF-8: byte {error.start} of line {number}") from None


_FILE = b"ARROW1"


def read_arrow(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Yield the rows of a file in Arrow's streaming or file format, numbered from 1."""
    row = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in _iter_batches(source):
                names = select_columns(config, batch.schema.names)
                batch.validate(full=True)  # otherwise damage leads to reads outside the buffer
                for record in batch.select(names).to_pylist():
                    row += 1
                    yield record_from_dict(str(row), record, config, batch.schema.names)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise BadFileError(f"is no whole Arrow file, after row {row} ({_take_first_line(error)})") from None


def _iter_batches(source: pyarrow.MemoryMappedFile) -> Iterator[pyarrow.RecordBatch]:
    is_file = source.read(len(_FILE)) == _FILE
    source.seek(0)
    if is_file:
        file = pyarrow.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(source)


_TEXT_TYPES = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
BATCH_ROWS = 256
BATCH_BYTES = 2**24
"""Batches with more bytes of text are converted row by row."""


def read_parquet(path: Path, config: ReadConfig) -> Iterator[Record | BadRecord]:
    """Yield the rows of a file, numbered from 1. Only the needed columns are read."""
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            selected = select_columns(config, names)
            # A text shared by all rows is stored once and may be as long as all others together: it stays a dictionary.
            texts = [name for name in selected if file.schema_arrow.field(name).type in _TEXT_TYPES]
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            batches = file.iter_batches(BATCH_ROWS, columns=selected)
            for record in chain.from_iterable(map(_iter_rows, batches)):
                row += 1
                if record is None:
                    yield BadRecord(str(row), f"is longer than {MAX_RECORD_BYTES:,} bytes")
                else:
                    yield record_from_dict(str(row), record, config, names)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise BadFileError(f"is no whole Parquet file, after row {row} ({_take_first_line(error)})") from None


def _iter_rows(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any] | None]:
    """Yield the rows as dictionaries; None for a row whose texts exceed MAX_RECORD_BYTES."""
    batch.validate(full=True)  # otherwise damage leads to reads outside the buffer
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        if pyarrow.types.is_dictionary(column.type):
            sizes += _measure_texts(column)
    if sizes.sum() <= BATCH_BYTES:
        yield from batch.to_pylist()
        return
    for row, size in enumerate(sizes.tolist()):
        yield None if size > MAX_RECORD_BYTES else batch.slice(row, 1).to_pylist()[0]


def _measure_texts(column: pyarrow.DictionaryArray) -> NDArray[np.int64]:
    """Return the bytes of each text of a column; 0 for null."""
    dictionary_lengths = compute.binary_length(column.dictionary)
    lengths = dictionary_lengths.take(column.indices).fill_null(0)
    return np.asarray(lengths, np.int64)


def _take_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
