"""Documents of a corpus's input files: whole text files, and the records of other formats."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.documents import Document, StepStats, to_drop_reason
from megatfm.data_prep.input_files import BadFile, InputFile, InputFiles
from megatfm.data_prep.readers import get_reader
from megatfm.data_prep.readers.record import BadFileError, BadRecord
from megatfm.data_prep.readers.text import cut_text, read_text
from megatfm.errors import MegatfmError


class DocumentReader:
    """Reads a corpus's files as documents of at most `limit` bytes.

    files: the files to read; by default all. bad_files: unusable files to count; by default all that are known.
    """

    def __init__(
        self,
        inputs: InputFiles,
        limit: int,
        files: Sequence[InputFile] | None = None,
        bad_files: Sequence[BadFile] | None = None,
    ) -> None:
        self.counts = StepStats("read")
        self._inputs = inputs
        self._config: ReadConfig = inputs.config
        self._limit = limit
        self._files = inputs.files if files is None else files
        self._bad_files = inputs.bad if bad_files is None else bad_files

    def iter_documents(self, advance: Callable[[int], None]) -> Iterator[Document]:
        """Yield the documents of all files; `advance` is called with the bytes of every finished file."""
        for bad in self._bad_files:
            self._drop(bad.reason, 0, bad.where)
        for file in self._files:
            name = self._inputs.find_format(file)
            with self._inputs.fetch(file) as path:
                for document in self._read_text(file, path) if name == "text" else self._read_records(file, path, name):
                    self.counts.count_input(document.text_bytes)
                    if document.text.strip():
                        self.counts.count_kept(document.text_bytes)
                        yield document
                    else:
                        self.counts.count_dropped("empty", document.text_bytes, document.id)
            advance(file.size)

    def _read_text(self, file: InputFile, path: Path) -> Iterator[Document]:
        """Yield the parts of a text file, or none if it is bad.

        The file is read twice: a partly bad file must not be used, and a large one must not be held in memory.
        """
        try:
            n_parts = sum(1 for _ in read_text(path, self._limit))
        except (OSError, BadFileError) as error:
            reason = f"can't be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            self._inputs.skip_or_refuse(file.path, reason)
            self._drop(reason.partition(" at byte ")[0], file.size, f"{file.name}: {reason}")
            return
        self.counts.changed += n_parts > 1
        try:
            for part, text in zip(range(n_parts), read_text(path, self._limit), strict=True):
                if n_parts == 1:
                    yield Document(file.name, text)
                else:
                    yield Document(f"{file.name}#{part}", text, record=file.name)
        except (OSError, BadFileError, ValueError) as error:  # ValueError: of zip
            raise MegatfmError(
                f"{file.path}: changed while it was read ({error}): run the same command again"
            ) from None

    def _read_records(self, file: InputFile, path: Path, name: str) -> Iterator[Document]:
        """Yield the records of a file. All unusable records are counted, and the first one is reported."""
        is_reported = False
        try:
            for record in get_reader(name)(path, self._config):
                source = f"{file.name}#{record.key}"
                if isinstance(record, BadRecord):
                    if not is_reported:
                        self._inputs.skip_or_refuse(file.path, f"record {record.key} {record.reason}")
                    is_reported = True
                    self._drop(record.reason, 0, source)
                    continue
                texts = list(cut_text(record.text, self._limit))
                self.counts.changed += len(texts) > 1
                for part, text in enumerate(texts):
                    if len(texts) == 1:
                        yield Document(source, text, record.url, fields=record.fields)
                    else:
                        yield Document(f"{source}.{part}", text, record.url, fields=record.fields, record=source)
        except BadFileError as error:
            self._inputs.skip_or_refuse(file.path, str(error))
            self._drop("unreadable file", 0, f"{file.name}: {error}")

    def _drop(self, reason: str, size: int, example: str) -> None:
        self.counts.count_input(size)
        self.counts.count_dropped(to_drop_reason(reason), size, example)
