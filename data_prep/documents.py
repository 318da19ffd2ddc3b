"""Documents, and the files in which they wait between two stages: JSON lines under zstd."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import zstandard

from megatfm.data.files import AtomicFile
from megatfm.data.statistics import domain
from megatfm.errors import MegatfmError

BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Document:
    """A text and where it was read: a path below the corpus folder, with `#N` for the N-th part or record of a file.

    `url` and `language` are known of some only. `fields` are what else is said of it, by name: values of JSON.
    `record` is the source of the record or file that it is a piece of, if that was cut.
    """

    id: str
    text: str
    url: str = ""
    language: str = ""
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    record: str = ""

    @property
    def text_bytes(self) -> int:
        """Its length in UTF-8 bytes."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())

    def to_list(self) -> list[Any]:
        """What tells it from all others; what comes after the text only if it is known."""
        known = [self.id, self.text, self.url, self.language, dict(self.fields)]
        if self.record:
            return [*known, self.record]
        return known if self.fields else known[:4] if self.url or self.language else known[:2]

    def get(self, name: str) -> Any:
        """What is said of it under a name: a field, else its "domain", "language" or "url"; None if nothing is."""
        if name in self.fields:
            return self.fields[name]
        known = {"domain": self.domain, "language": self.language, "url": self.url}
        return known.get(name) or None

    @property
    def unit(self) -> str:
        """The source of the whole that it is or is a piece of: a record or a file."""
        return self.record or self.id

    @property
    def file(self) -> str:
        """The file that it is, or is a part of."""
        return self.id.partition("#")[0]

    @property
    def domain(self) -> str:
        """The host of its address, without `www.`; empty if it has none."""
        return domain(self.url)

    @property
    def top_level(self) -> str:
        """The top-level package: the first folder of the path, or the file if it lies in none."""
        return self.file.partition("/")[0]


class DocumentWriter:
    """Writes documents to a file that appears under its name only by `commit`."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self._zstd = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()

    def add(self, document: Document) -> None:
        """Append a line of JSON to the compressed stream."""
        line = json.dumps(document.to_list(), ensure_ascii=False)
        self._file.write(self._zstd.compress(f"{line}\n".encode()))

    def commit(self) -> None:
        """End the stream, sync the file and give it its name. Raises MegatfmError when the disk refuses."""
        self._file.write(self._zstd.flush())
        self._file.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.discard()


class ChunkedDocumentWriter:
    """Writes documents to `NAME.00000.jsonl.zst` and so on, of about `part_bytes` of text each; at least one."""

    def __init__(self, folder: Path, name: str, part_bytes: int) -> None:
        self._folder, self._name, self._part_bytes = folder, name, part_bytes
        self.ChunkedDocumentWriter = 0
        self.bytes = 0
        self._size = 0
        self._open = DocumentWriter(part_path(folder, name, 0))

    @property
    def is_full(self) -> bool:
        """Whether the next document begins another part."""
        return self._size >= self._part_bytes

    def add(self, document: Document) -> None:
        """Append to the open part, or to a new one if that is full: a document is never cut."""
        if self.is_full:
            self._open.commit()
            self.ChunkedDocumentWriter += 1
            self._size = 0
            self._open = DocumentWriter(part_path(self._folder, self._name, self.ChunkedDocumentWriter))
        self._open.add(document)
        self._size += document.text_bytes
        self.bytes += document.text_bytes

    def commit(self) -> None:
        """Finish the last part; `parts` is then how many there are."""
        self._open.commit()
        self.ChunkedDocumentWriter += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)


def part_path(folder: Path, name: str, part: int) -> Path:
    """Where the documents of one part wait."""
    return folder / f"{name}.{part:05d}.jsonl.zst"


def read_parts(folder: Path, name: str, parts: int) -> Iterator[Document]:
    """The documents of all parts, one after the other."""
    for part in range(parts):
        yield from read_documents(part_path(folder, name, part))


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a file that a DocumentWriter committed."""
    # A stream_reader would take the end of a truncated file for the end of the documents.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    line_begun = b""
    try:
        with open(path, "rb") as file:
            while data := file.read(BLOCK_BYTES):
                *lines, line_begun = (line_begun + decompressor.decompress(data)).split(b"\n")
                for line in lines:
                    yield Document(*json.loads(line))
        if not decompressor.eof:
            raise ValueError("it is truncated")
    except (OSError, zstandard.ZstdError, ValueError, TypeError, RecursionError) as error:
        raise MegatfmError(
            f"{path}: can't be read back ({error}): delete {path.parent} and prepare again"
        ) from error
