"""Documents of blocks, read lazily, and the quarantine of documents that must not be read."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.images import ImageColumns, list_image_extensions, read_upright_size
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError


@dataclass(frozen=True)
class DecodedBlock:
    """A decoded block: the tokens of each document, and its files if they are needed."""

    tokens: list[NDArray[Any]]
    members: list[Mapping[str, bytes]] | None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        files = sum(len(data) for member in self.members or () for data in member.values())
        return files + sum(tokens.nbytes for tokens in self.tokens)


class BlockDocuments(Sequence[NDArray[Any]]):
    """A lazy sequence of the tokens [n] of each document in blocks `begin` to `end` − 1.

    is_quarantined [D]: True for documents that are never read; they become zeros of the same length. cache: of decoded
    blocks.
    """

    def __init__(
        self,
        corpus: Corpus,
        begin: int,
        end: int,
        is_quarantined: NDArray[np.bool_] | None,
        cache: "ByteCache[int, DecodedBlock]",
        needs_files: bool,
    ) -> None:
        self._corpus, self._begin, self._end, self.is_quarantined = corpus, begin, end, is_quarantined
        self._cache, self._needs_files = cache, needs_files
        self._starts = corpus.blocks[begin : end + 1] - corpus.blocks[begin]
        self.first = int(corpus.blocks[begin])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Token count of each document, from the index alone."""
        return self._corpus.lengths(self._begin, self._end)

    @cached_property
    def image_sizes(self) -> NDArray[np.int64]:
        """Height and width of each document's image, from the index alone."""
        return ImageColumns(self._corpus, self._begin, self._end).image_sizes

    @cached_property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of each document's images, from the index alone."""
        return ImageColumns(self._corpus, self._begin, self._end).image_counts

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, number: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if self.is_quarantined is not None and self.is_quarantined[number]:
            return np.zeros(int(self.lengths[number]), np.int64)
        block, at = self._locate_document(number)
        return block.tokens[at]

    def members(self, number: int) -> Mapping[str, bytes]:
        """Return the files stored with a document, by extension; none if they are not needed."""
        if not self._needs_files or (self.is_quarantined is not None and self.is_quarantined[number]):
            return {}
        block, at = self._locate_document(number)
        return block.members[at] if block.members else {}

    def describe(self, number: int) -> tuple[str, str]:
        """Describe where a document is stored, and how to train without it, for error messages."""
        return self._corpus.describe_sample(self.first + number)

    def _locate_document(self, number: int) -> tuple[DecodedBlock, int]:
        at = int(self._starts.searchsorted(number, side="right")) - 1
        block = self._begin + at
        decoded = self._cache.get(block, partial(decode_block, self._corpus, block, self._needs_files))
        return decoded, number - int(self._starts[at])


class InMemoryDocuments(list[NDArray[Any]]):
    """Documents in memory; `first` is the index of the first one in the corpus."""

    def __init__(
        self,
        documents: Sequence[NDArray[Any]],
        first: int = 0,
        members: Sequence[Mapping[str, bytes]] | None = None,
        is_quarantined: NDArray[np.bool_] | None = None,
    ) -> None:
        super().__init__(documents)
        self.first, self.is_quarantined = first, is_quarantined
        self._members = members

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Token count of each document."""
        return np.array([len(document) for document in self], np.int64)

    @cached_property
    def image_sizes(self) -> NDArray[np.int64]:
        """Height and width of each document's image, from the image header."""
        sizes = [read_upright_size(self.members(number)) or (1, 1) for number in range(len(self))]
        return np.array(sizes, np.int64).reshape(-1, 2)

    @cached_property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of each document's images, from the names of its files."""
        return np.array([len(list_image_extensions(self.members(number))) for number in range(len(self))], np.int64)

    def measure(self, chunk_sizes: Callable[[DocumentChunk], tuple[int, int]] | None) -> None:
        """Replace `image_sizes` by the two sizes that an objective computes for each document, if it does."""
        if chunk_sizes is not None:
            chunks = (DocumentChunk(tokens, files=self.members(n)) for n, tokens in enumerate(self))
            self.image_sizes = np.array([chunk_sizes(chunk) for chunk in chunks], np.int64).reshape(-1, 2)

    def members(self, number: int) -> Mapping[str, bytes]:
        """Return the files stored with a document, by extension; none if they are not needed."""
        return self._members[number] if self._members else {}

    def describe(self, number: int) -> tuple[str, str]:
        """Describe where a document is stored, and how to train without it, for error messages."""
        return f"sample {self.first + number}", ""


def read_block(
    corpus: Corpus, block: int, is_quarantined: NDArray[np.bool_] | None, needs_files: bool
) -> InMemoryDocuments:
    """Read one block. Quarantined documents become zeros of the same length; if all are, nothing is read."""
    first = int(corpus.blocks[block])
    if is_quarantined is None:
        decoded = decode_block(corpus, block, needs_files)
        return InMemoryDocuments(decoded.tokens, first, decoded.members)
    decoded = DecodedBlock([], None) if is_quarantined.all() else decode_block(corpus, block, needs_files)
    lengths = corpus.lengths(block, block + 1).tolist()
    tokens = [
        np.zeros(n, np.int64) if is_bad else decoded.tokens[i]
        for i, (n, is_bad) in enumerate(zip(lengths, is_quarantined, strict=True))
    ]
    return InMemoryDocuments(tokens, first, decoded.members, is_quarantined)


def decode_block(corpus: Corpus, block: int, needs_files: bool) -> DecodedBlock:
    """Read and decode a block, with the files of its documents if `needs_files`."""
    if needs_files:
        samples = corpus.read_block_samples(block)
        return DecodedBlock([sample.tokens for sample in samples], [sample.members for sample in samples])
    return DecodedBlock([tokens for _, tokens in corpus.read_block(block)], None)


_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True)
class Quarantine:
    """Samples excluded from training, as sorted, disjoint ranges (first, end) of sample indices."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, entries: Sequence[str], n_samples: int) -> "Quarantine":
        """Parse entries such as "17" and "120-153" (inclusive). Raises a UsageError for any other, or out of range."""
        sample_ranges = []
        for entry in entries:
            match = _RANGE.fullmatch(entry)
            first = int(match[1]) if match else 0
            last = int(match[2] or match[1]) if match else -1
            if not first <= last < n_samples:
                raise UsageError(
                    f"quarantine {entry!r}: give a sample such as '17', or a range such as '120-153', of the "
                    f"corpus's 0 to {n_samples - 1}"
                )
            sample_ranges.append((first, last + 1))
        ranges: list[tuple[int, int]] = []
        for first, end in sorted(sample_ranges):
            if ranges and first <= ranges[-1][1]:
                begin, until = ranges.pop()
                first, end = begin, max(end, until)
            ranges.append((first, end))
        return cls(tuple(ranges))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def mask(self, first: int, end: int) -> NDArray[np.bool_]:
        """Return a mask [end − first] of the samples `first` … `end` − 1 that are in quarantine."""
        samples = np.arange(first, end)
        at = np.searchsorted([begin for begin, _ in self.ranges], samples, side="right") - 1
        ends = np.array([0, *(stop for _, stop in self.ranges)])
        return samples < ends[at + 1]

    def __str__(self) -> str:
        return ",".join(f"{first}-{end - 1}" for first, end in self.ranges)
