"""Documents, their files between two stages (JSON lines under zstd), and the statistics of a step."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import zstandard

from megatfm.corpus.files import AtomicFile
from megatfm.corpus.inspect import get_domain
from megatfm.errors import MegatfmError

BLOCK_BYTES = 2**20
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """A text and its source: a path below the corpus folder, with `#N` for the N-th part or record of a file.

    url, language: empty if unknown. fields: further metadata by name, as JSON values. record: source of the record or
    file that was cut, if this document is a part of one.
    """

    id: str
    text: str
    url: str = ""
    language: str = ""
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    record: str = ""

    @property
    def text_bytes(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())

    def to_list(self) -> list[Any]:
        """Return the document as a list, without trailing fields that are empty."""
        values = [self.id, self.text, self.url, self.language, dict(self.fields)]
        if self.record:
            return [*values, self.record]
        return values if self.fields else values[:4] if self.url or self.language else values[:2]

    def get(self, name: str) -> Any:
        """Return metadata by name: a field, else "domain", "language" or "url"; None if it is unknown."""
        if name in self.fields:
            return self.fields[name]
        values = {"domain": self.domain, "language": self.language, "url": self.url}
        return values.get(name) or None

    @property
    def unit(self) -> str:
        """Source of the record or file that this document is, or is a part of."""
        return self.record or self.id

    @property
    def file(self) -> str:
        """The file that this document is, or is a part of."""
        return self.id.partition("#")[0]

    @property
    def domain(self) -> str:
        """The host of its address, without `www.`; empty if it has none."""
        return get_domain(self.url)

    @property
    def top_level(self) -> str:
        """The top-level folder: the first folder of the path, or the file if it lies in none."""
        return self.file.partition("/")[0]


class TokenizedDocument(NamedTuple):
    """A document whose ids lie in a file of its part, as the commit of the part stores it.

    source: as `Document.id`. n_tokens, text_bytes: of its text. member_sizes: extension and bytes of each file beside
    it. corpus: name of its corpus, if the split has several.
    """

    source: str
    n_tokens: int
    text_bytes: int
    member_sizes: Sequence[tuple[str, int]] = ()
    domain: str = ""
    language: str = ""
    fields: Mapping[str, Any] = MappingProxyType({})
    corpus: str = ""

    def to_list(self) -> list[Any]:
        """Return the fields as JSON, without empty ones at the end."""
        values = [*self[:6], dict(self.fields), self.corpus]
        while len(values) > 3 and not values[-1]:
            values.pop()
        return values


class DocumentWriter:
    """Writes documents to a file that appears under its name only by `commit`."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self._zstd = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()

    def add(self, document: Document) -> None:
        """Append a line of JSON to the compressed stream."""
        line = json.dumps(document.to_list(), ensure_ascii=False)
        self._file.write(self._zstd.compress(f"{line}\n".encode()))

    def write(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents; each is appended on the way."""
        for document in documents:
            self.add(document)
            yield document

    def commit(self) -> None:
        """End the stream, sync the file and give it its name. Raises MegatfmError when the disk refuses."""
        self._file.write(self._zstd.flush())
        self._file.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.discard()


class ChunkedDocumentWriter:
    """Writes documents to `NAME.00000.jsonl.zst` and so on, of about `part_bytes` of text each; at least one."""

    def __init__(self, folder: Path, name: str, part_bytes: int) -> None:
        self._folder, self._name, self._part_bytes = folder, name, part_bytes
        self.parts = 0
        self.bytes = 0
        self._size = 0
        self._open = DocumentWriter(get_part_path(folder, name, 0))

    @property
    def is_full(self) -> bool:
        """Whether the next document begins another part."""
        return self._size >= self._part_bytes

    def add(self, document: Document) -> None:
        """Append to the open part, or to a new one if that is full: a document is never cut."""
        if self.is_full:
            self._open.commit()
            self.parts += 1
            self._size = 0
            self._open = DocumentWriter(get_part_path(self._folder, self._name, self.parts))
        self._open.add(document)
        self._size += document.text_bytes
        self.bytes += document.text_bytes

    def commit(self) -> None:
        """Finish the last part; `parts` is then how many there are."""
        self._open.commit()
        self.parts += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)


def batch_by_bytes(documents: Iterable[Document], batch_bytes: int) -> Iterator[list[Document]]:
    """Yield the documents in batches of at least `batch_bytes` of text; the last may be smaller."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.text_bytes
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def get_part_path(folder: Path, name: str, part: int) -> Path:
    """Return the path of the documents of one part."""
    return folder / f"{name}.{part:05d}.jsonl.zst"


def read_parts(folder: Path, name: str, parts: int) -> Iterator[Document]:
    """Yield the documents of all parts in order."""
    for part in range(parts):
        yield from read_documents(get_part_path(folder, name, part))


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file that a DocumentWriter committed. Raises MegatfmError if it is damaged."""
    # A stream_reader would take the end of a truncated file for the end of the documents.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    partial_line = b""
    try:
        with open(path, "rb") as file:
            while data := file.read(BLOCK_BYTES):
                *lines, partial_line = (partial_line + decompressor.decompress(data)).split(b"\n")
                for line in lines:
                    yield Document(*json.loads(line))
        if not decompressor.eof:
            raise ValueError("it is truncated")
    except (OSError, zstandard.ZstdError, ValueError, TypeError, RecursionError) as error:
        raise MegatfmError(f"{path}: can't be read back ({error}): delete {path.parent} and prepare again") from error


EXAMPLES = 10


@dataclass
class DropCount:
    """Documents dropped for one reason, with the first few as examples."""

    documents: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class StepStats:
    """Documents and UTF-8 bytes of text that a step took in, changed, dropped and passed on."""

    step: str
    documents_in: int = 0
    bytes_in: int = 0
    changed: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    dropped: dict[str, DropCount] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    """Counts of findings by name: languages, redactions, removed lines."""

    def count_event(self, event: str, times: int = 1) -> None:
        """Count a finding, such as a redaction: it may happen several times in one document."""
        self.found[event] = self.found.get(event, 0) + times

    def count_input(self, size: int) -> None:
        """Count a document that comes in; size: UTF-8 bytes of its text."""
        self.documents_in += 1
        self.bytes_in += size

    def count_kept(self, size: int) -> None:
        """Count a document that is passed on; size: UTF-8 bytes of its text, as it is now."""
        self.documents_out += 1
        self.bytes_out += size

    def count_dropped(self, reason: str, size: int, example: str) -> None:
        """Count a document as dropped, by reason; size: UTF-8 bytes; of the examples only the first few are kept."""
        dropped = self.dropped.setdefault(reason, DropCount())
        dropped.documents += 1
        dropped.bytes += size
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(example)

    @classmethod
    def merge(cls, parts: Sequence[Mapping[str, Any]]) -> Self:
        """Sum the statistics of all parts of a corpus, which are JSON in the order of the corpus."""
        total_stats = cls(parts[0]["step"])
        for part in parts:
            for name in ("documents_in", "bytes_in", "changed", "documents_out", "bytes_out"):
                setattr(total_stats, name, getattr(total_stats, name) + part[name])
            for reason, dropped in part["dropped"].items():
                total = total_stats.dropped.setdefault(reason, DropCount())
                total.documents += dropped["documents"]
                total.bytes += dropped["bytes"]
                total.examples = [*total.examples, *dropped["examples"]][:EXAMPLES]
            for event, times in part.get("found", {}).items():
                total_stats.count_event(event, times)
        return total_stats

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, without `found` if it is empty."""
        values = asdict(self)
        if not self.found:
            del values["found"]
        return values


def to_drop_reason(reason: str) -> str:
    """Turn an error message into a drop reason: `is not JSON: …` → `not_json`."""
    words = re.sub(r"[^a-z0-9]+", "_", reason.partition(":")[0].lower().replace("'", "")).strip("_")
    return re.sub(r"^(is|has)_(an?_)?", "", words)


MANY_SKIPPED = 0.1
"""Share of unreadable documents above which there is a warning."""


def warn_of_skipped(read: StepStats) -> list[str]:
    """Return a note if many documents were unreadable and skipped. read: statistics of the first step."""
    drops = {reason: drop for reason, drop in read.dropped.items() if reason != "empty"}
    skipped = sum(drop.documents for drop in drops.values())
    if skipped <= MANY_SKIPPED * read.documents_in:
        return []
    reason, drop = max(drops.items(), key=lambda item: item[1].documents)
    return [
        f"{skipped:,} of {read.documents_in:,} documents ({100 * skipped / read.documents_in:.0f} %) were unreadable, "
        f"and were left out, most of them for {reason} (as {drop.examples[0]}): if a setting such as read.text_key or "
        "read.format is wrong, correct it and prepare again with overwrite=true"
    ]


def format_drop_reasons(counts: Iterable[StepStats]) -> str:
    """Format in one line why documents were dropped."""
    reasons = [
        f"{dropped.documents} dropped: {reason}"
        for step_counts in counts
        for reason, dropped in step_counts.dropped.items()
    ]
    return "; ".join(reasons) or "there were none"
