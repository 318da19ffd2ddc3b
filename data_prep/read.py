"""Read the files of a listing as documents, whatever their format."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.files import BadFile, InputFile, InputFiles
from megatfm.data_prep.readers import Bad, BadFileError, reader
from megatfm.data_prep.readers.text import cut_text, texts
from megatfm.errors import MegatfmError


class DocumentReader:
    """Turns files of a listing (`files`, else all) into documents of at most `limit` bytes.

    `bad`: files that were found to be bad before, so that they are counted; those of the listing, if left out.
    """

    def __init__(
        self,
        listing: InputFiles,
        limit: int,
        files: Sequence[InputFile] | None = None,
        bad: Sequence[BadFile] | None = None,
    ) -> None:
        self.counts = StepStats("read")
        self._listing = listing
        self._config: ReadConfig = listing.config
        self._limit = limit
        self._files = listing.files if files is None else files
        self._bad = listing.bad if bad is None else bad

    def documents(self, advance: Callable[[int], None]) -> Iterator[Document]:
        """The documents of all files; `advance` is told the bytes of every file that is done."""
        for bad in self._bad:
            self._drop(bad.reason, 0, bad.where)
        for file in self._files:
            name = self._listing.format(file)
            with self._listing.local(file) as path:
                for document in self._text(file, path) if name == "text" else self._records(file, path, name):
                    self.counts.count_input(document.text_bytes)
                    if document.text.strip():
                        self.counts.count_kept(document.text_bytes)
                        yield document
                    else:
                        self.counts.count_dropped("is empty", document.text_bytes, document.id)
            advance(file.size)

    def _text(self, file: InputFile, path: Path) -> Iterator[Document]:
        """The parts of a text file, or none if it is bad. It is read twice: half of a file is never used, and a
        large one is never held as a whole."""
        try:
            parts = sum(1 for _ in texts(path, self._limit))
        except (OSError, BadFileError) as error:
            reason = f"can't be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            self._listing.on_bad(file.path, reason)
            self._drop(reason.partition(" at byte ")[0], file.size, f"{file.name}: {reason}")
            return
        self.counts.changed += parts > 1
        try:
            for part, text in enumerate(texts(path, self._limit)):
                if parts == 1:
                    yield Document(file.name, text)
                else:
                    yield Document(f"{file.name}#{part}", text, record=file.name)
        except (OSError, BadFileError) as error:
            raise MegatfmError(
                f"{file.path}: changed while it was read ({error}): run the same command again"
            ) from None

    def _records(self, file: InputFile, path: Path, name: str) -> Iterator[Document]:
        """The records of a file; of those that can't be used the first is told of, and all are counted."""
        told = False
        try:
            for record in reader(name)(path, self._config):
                source = f"{file.name}#{record.key}"
                if isinstance(record, Bad):
                    if not told:
                        self._listing.on_bad(file.path, f"record {record.key} {record.reason}")
                    told = True
                    self._drop(f"{record.reason.partition(':')[0]}", 0, source)
                    continue
                pieces = list(cut_text(record.text, self._limit))
                self.counts.changed += len(pieces) > 1
                for part, text in enumerate(pieces):
                    if len(pieces) == 1:
                        yield Document(source, text, record.url, fields=record.fields)
                    else:
                        place = f"{source}.{part}"
                        yield Document(place, text, record.url, fields=record.fields, record=source)
        except BadFileError as error:
            self._listing.on_bad(file.path, str(error))
            self._drop("breaks off", 0, f"{file.name}: {error}")

    def _drop(self, reason: str, size: int, example: str) -> None:
        self.counts.count_input(size)
        self.counts.count_dropped(reason, size, example)
