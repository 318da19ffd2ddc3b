"""Arrow files, as a folder of the Hugging Face `datasets` library holds them: a record in each row."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import Bad, BadFileError, Record, columns, record_from_dict

_FILE = b"ARROW1"


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The rows of a file, by their numbers from 1, whether it is of Arrow's streaming or its file format."""
    row = 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in _batches(source):
                names = columns(config.fields, batch.schema.names)
                batch.validate(full=True)  # else damage is read as memory that is not there
                for record in batch.select(names).to_pylist():
                    row += 1
                    yield record_from_dict(str(row), record, config.fields, batch.schema.names)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise BadFileError(f"is no whole Arrow file, after row {row} ({reason})") from None


def _batches(source: pyarrow.MemoryMappedFile) -> Iterator[pyarrow.RecordBatch]:
    is_file = source.read(len(_FILE)) == _FILE
    source.seek(0)
    if is_file:
        file = pyarrow.ipc.open_file(source)
        yield from (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(source)
