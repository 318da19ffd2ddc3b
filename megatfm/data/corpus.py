"""A corpus on disk: random access to its documents through the index, and only whole, checked frames."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.data.files import RESTORE, check_size, read_range
from megatfm.data.index import ShardIndex
from megatfm.data.manifest import Manifest, Shard
from megatfm.data.members import NPY_HEADER_BYTES, PAYLOAD_OFFSET, Sample, decode_sample, npy_header
from megatfm.errors import MegatfmError, UsageError


class Corpus:
    """A folder of shards with a manifest, opened by `Corpus.open`.

    A block is one frame: a fixed run of consecutive documents, the unit of reading and of packing.
    `blocks` [n_blocks + 1] holds the number of each block's first sample, and in the end n_samples.

    The index of all samples is held in memory (20 bytes and the key of each); the text is not. Reading
    is thread-safe.
    """

    def __init__(self, folder: Path, manifest: Manifest, indexes: list[ShardIndex]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.indexes = indexes
        frames = [len(index.frames) for index in indexes]
        self._first_blocks = np.concatenate([[0], np.cumsum(frames, dtype=np.int64)])
        samples = np.concatenate([index.frames["samples"] for index in indexes])
        self.blocks: NDArray[np.int64] = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a corpus after checking manifest, file sizes and indexes (not the shards' content).

        Raises a UsageError if the folder is no corpus, a MegatfmError that names the first bad file.
        """
        folder = Path(folder)
        manifest = Manifest.load(folder)
        return cls(folder, manifest, [_open_index(folder, shard, manifest) for shard in manifest.shards])

    @property
    def fingerprint(self) -> str:
        """A hash of what determines the samples and their order."""
        return self.manifest.fingerprint

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest.tokenizer_hash

    @property
    def n_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def n_samples(self) -> int:
        return int(self.blocks[-1])

    @property
    def n_tokens(self) -> int:
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def n_text_bytes(self) -> int:
        """The UTF-8 bytes of the text, for bits per byte."""
        return sum(shard.text_bytes for shard in self.manifest.shards)

    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of every sample [n_samples]."""
        return np.concatenate([index.samples["tokens"] for index in self.indexes]).astype(np.int64)

    def check_tokenizer(self, tokenizer_hash: str) -> None:
        """Raise a UsageError unless the corpus was written with the tokenizer of this hash."""
        if tokenizer_hash != self.tokenizer_hash:
            raise UsageError(
                f"{self.folder}: was written with tokenizer {self.tokenizer_hash[:16]}, but the one given is "
                f"{tokenizer_hash[:16]}: use the tokenizer beside the corpus, or prepare it again"
            )

    def block(self, number: int) -> list[tuple[int, NDArray[Any]]]:
        """The samples of a block: (sample number, read-only tokens [n] in the stored type)."""
        shard, frame, data = self._frame(number)
        index = self.indexes[shard]
        first, end = index.first_samples[frame : frame + 2]
        tokens = [self._tokens(shard, frame, sample, data) for sample in range(first, end)]
        return list(enumerate(tokens, start=int(self.blocks[number])))

    def block_lengths(self, number: int) -> NDArray[np.int64]:
        """The numbers of tokens of a block's samples [n], from the index alone."""
        shard, frame = self._place(number)
        index = self.indexes[shard]
        first, end = index.first_samples[frame : frame + 2]
        return index.samples["tokens"][first:end].astype(np.int64)

    def samples(self, number: int) -> list[Sample]:
        """The samples of a block with all that is stored of them; every byte is held against the index."""
        shard, frame, data = self._frame(number)
        index, at = self.indexes[shard], 0
        found: list[Sample] = []
        for sample in range(*index.first_samples[frame : frame + 2]):
            entry = index.samples[sample]
            key = entry["key"].decode("ascii", "replace")
            tokens = self._tokens(shard, frame, sample, data)
            try:
                if entry["offset"] != at + PAYLOAD_OFFSET:
                    raise MegatfmError(f"it should start at byte {at} of its frame")
                source, text_bytes, at = decode_sample(data, at, key, len(tokens), self.manifest.dtype)
                if text_bytes != entry["text_bytes"]:
                    raise MegatfmError(f"its text has {text_bytes} bytes, not {entry['text_bytes']}")
            except MegatfmError as error:
                raise self._damage(shard, frame, str(error), sample) from error
            found.append(Sample(int(self.blocks[number]) + len(found), key, source, text_bytes, tokens))
        if data[at:].strip(b"\0"):
            raise self._damage(shard, frame, f"unknown data after byte {at} of the frame")
        return found

    def sample(self, number: int) -> Sample:
        """One sample, by its number; a UsageError if there is none such."""
        if not 0 <= number < self.n_samples:
            raise UsageError(f"{self.folder}: has samples 0 to {self.n_samples - 1}, not {number}")
        block = int(np.searchsorted(self.blocks, number, side="right")) - 1
        return self.samples(block)[number - int(self.blocks[block])]

    def frame_bytes(self, number: int) -> bytes:
        """A block as it lies in its shard: one compressed frame."""
        shard, frame = self._place(number)
        offset, end = map(int, self.indexes[shard].offsets[frame : frame + 2])
        return read_range(self._path(shard), offset, end - offset)

    def shard_blocks(self, shard: int) -> range:
        """The numbers of a shard's blocks."""
        return range(*map(int, self._first_blocks[shard : shard + 2]))

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.n_blocks:
            raise MegatfmError(f"{self.folder}: has blocks 0 to {self.n_blocks - 1}, not {number}")
        shard = int(np.searchsorted(self._first_blocks, number, side="right")) - 1
        return shard, number - int(self._first_blocks[shard])

    def _frame(self, number: int) -> tuple[int, int, bytes]:
        shard, frame = self._place(number)
        compressed = self.frame_bytes(number)
        said = int(self.indexes[shard].frames["uncompressed"][frame])
        try:
            found = zstandard.frame_content_size(compressed)
            # Compared before anything is allocated for it.
            if found != said:
                raise self._damage(shard, frame, f"holds {found} bytes, the index says {said}")
            return shard, frame, zstandard.ZstdDecompressor().decompress(compressed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._damage(shard, frame, str(error)) from error

    def _tokens(self, shard: int, frame: int, sample: int, data: bytes) -> NDArray[Any]:
        entry = self.indexes[shard].samples[sample]
        start, n, dtype = int(entry["offset"]), int(entry["tokens"]), self.manifest.dtype
        if data[max(start - NPY_HEADER_BYTES, 0) : start] != npy_header(dtype, n):
            raise self._damage(shard, frame, f"no array of {n} {dtype} at byte {start} of the frame", sample)
        return np.frombuffer(data, dtype, n, start)

    def _path(self, shard: int) -> Path:
        return self.folder / self.manifest.shards[shard].file

    def _damage(self, shard: int, frame: int, reason: str, sample: int | None = None) -> MegatfmError:
        block = int(self._first_blocks[shard]) + frame
        first = int(self.blocks[self._first_blocks[shard]])
        samples = f"samples {self.blocks[block]} to {self.blocks[block + 1] - 1}"
        where = samples if sample is None else f"sample {first + sample}"
        place = f"{where} in frame {frame} at byte {self.indexes[shard].offsets[frame]}"
        block_samples = f'"{self.blocks[block]}-{self.blocks[block + 1] - 1}"'
        return MegatfmError(
            f"{self._path(shard)}: {place}: damaged: {reason}: {RESTORE}; to train without them, put "
            f"{block_samples} into the corpus's quarantine (data.quarantine)"
        )


def _open_index(folder: Path, shard: Shard, manifest: Manifest) -> ShardIndex:
    check_size(folder / shard.file, shard.bytes)
    path = folder / shard.index.file
    check_size(path, shard.index.bytes)
    data = read_range(path, 0, shard.index.bytes)
    try:
        if blake3(data).hexdigest() != shard.index.blake3:
            raise MegatfmError("its BLAKE3 hash is not the manifest's")
        return ShardIndex.decode(data, shard, manifest.dtype.itemsize)
    except MegatfmError as error:
        raise MegatfmError(f"{path}: {error}: {RESTORE}") from error
