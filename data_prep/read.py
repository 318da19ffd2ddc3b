"""Read files as documents: strict UTF-8, long ones cut at blank lines."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data_prep.counts import Counts
from data_prep.documents import Document
from data_prep.files import BadFile, Listing, TextFile
from megatfm.errors import MegatfmError


class Read:
    """Turns files of a listing (`files`, else all) into documents of at most `limit` bytes.

    `bad`: files that were found to be bad before, so that they are counted; those of the listing, if left out.
    """

    def __init__(
        self,
        listing: Listing,
        limit: int,
        files: Sequence[TextFile] | None = None,
        bad: Sequence[BadFile] | None = None,
    ) -> None:
        self.counts = Counts("read")
        self._listing = listing
        self._limit = limit
        self._files = listing.files if files is None else files
        self._bad = listing.bad if bad is None else bad

    def documents(self, advance: Callable[[int], None]) -> Iterator[Document]:
        """The documents of all files; `advance` is told the bytes of every file that is done."""
        for bad in self._bad:
            self._drop(bad.reason, 0, str(bad.path))
        for file in self._files:
            for document in self._read(file):
                self.counts.take(document.text_bytes)
                if document.text.strip():
                    self.counts.keep(document.text_bytes)
                    yield document
                else:
                    self.counts.drop("is empty", document.text_bytes, document.source)
            advance(file.size)

    def _read(self, file: TextFile) -> Iterator[Document]:
        """The parts of a file, or none if it is bad. It is read twice: half of a file is never used, and a
        large one is never held as a whole."""
        try:
            parts = sum(1 for _ in _texts(file.path, self._limit))
        except (OSError, _NotTextError) as error:
            reason = f"can't be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            self._listing.on_bad(file.path, reason)
            self._drop(reason.partition(" at byte ")[0], file.size, f"{file.name}: {reason}")
            return
        self.counts.changed += parts > 1
        try:
            for part, text in enumerate(_texts(file.path, self._limit)):
                yield Document(f"{file.name}#{part}" if parts > 1 else file.name, text)
        except (OSError, _NotTextError) as error:
            raise MegatfmError(
                f"{file.path}: changed while it was read ({error}): run the same command again"
            ) from None

    def _drop(self, reason: str, size: int, example: str) -> None:
        self.counts.take(size)
        self.counts.drop(reason, size, example)


class _NotTextError(Exception):
    """The bytes of a file are no UTF-8 text."""


def _texts(path: Path, limit: int) -> Iterator[str]:
    offset = 0
    for data in _pieces(path, limit):
        if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise _NotTextError("is UTF-16, not UTF-8 (convert it with: iconv -f UTF-16 -t UTF-8)")
        if (zero := data.find(b"\0")) >= 0:
            raise _NotTextError(f"is a binary file, with a zero at byte {offset + zero}")
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _NotTextError(f"is not valid UTF-8 at byte {offset + error.start}") from None
        offset += len(data)


def _pieces(path: Path, limit: int) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most `limit`, cut after a blank line, else a line, else a character."""
    with open(path, "rb") as file:
        data = file.read(limit)
        while more := file.read(limit):
            data += more
            while len(data) > limit:
                cut = _cut(data, limit)
                yield data[:cut]
                data = data[cut:]
        yield data


def _cut(data: bytes, limit: int) -> int:
    for end in (b"\n\n", b"\n"):
        cut = data.rfind(end, limit // 2, limit)
        if cut >= 0:
            return cut + len(end)
    # Bytes 10xxxxxx continue a character, which has at most three of them; longer runs are no UTF-8 anyway.
    return next((cut for cut in range(limit, limit - 4, -1) if data[cut] & 0xC0 != 0x80), limit)
