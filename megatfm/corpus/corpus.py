"""A corpus on disk: random access to its documents through the index. Reads whole, verified frames only."""

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.files import read_at
from megatfm.corpus.index_cache import open_indexes
from megatfm.corpus.manifest import MANIFEST, NO_TOKENIZER, Manifest
from megatfm.corpus.shard_format import (
    PAYLOAD_OFFSET,
    BadFrameError,
    Sample,
    check_external_sample,
    decode_packed_documents,
    decode_sample,
    decompress_frame,
    decompress_frames,
    make_npy_header,
)
from megatfm.corpus.shard_index import NPY_HEADER_BYTES, hash_frame
from megatfm.corpus.storage import CachedRemoteStorage, ShardCacheConfig, ShardStorage, open_storage
from megatfm.corpus.webdataset_images import LabelRule, read_image_files
from megatfm.errors import MegatfmError, UsageError


class Corpus:
    """A folder of shards with a manifest, opened by `Corpus.open`.

    A block is one frame: a fixed run of consecutive documents, the unit of reading and of packing.

    Memory: a few bytes per block, and 8 bytes per sample for the most recently used indexes; or a file that all
    processes of a machine map (see `index_cache`). Text is not cached. Reading is thread-safe. `folder` is the corpus
    folder, or the local cache of a URL.

    The first read of a frame verifies it against the index: the offsets of its samples, and its hash if it has one.
    zstd frames also carry checksums. `read_block_samples` verifies every byte each time.
    """

    def __init__(self, store: ShardStorage, manifest: Manifest, cache: ShardCacheConfig | None = None) -> None:
        self.store = store
        self.folder = store.folder
        self.manifest = manifest
        self.indexes = open_indexes(store, manifest, cache)
        self._verified = np.zeros(self.n_blocks, np.bool_)
        self._labels = LabelRule.from_provenance(manifest.provenance)

    @classmethod
    def open(cls, location: str | Path, cache: ShardCacheConfig | None = None) -> Self:
        """Open a corpus after checking manifest, file sizes and indexes (not the content of shards).

        location: a folder, or a URL whose files are downloaded to `cache`. Raises a UsageError if it is not a corpus,
        and a MegatfmError that names the first damaged file.
        """
        store = open_storage(location, cache or ShardCacheConfig())
        if isinstance(store, CachedRemoteStorage):
            manifest = Manifest.parse(store.fetch_manifest(MANIFEST), f"{store.url}/{MANIFEST}")
        else:
            manifest = Manifest.load(store.folder)
        for shard in manifest.shards:
            store.check(shard)
        return cls(store, manifest, cache)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the samples and their stored order."""
        return self.manifest.fingerprint

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer whose ids the shards hold."""
        return self.manifest.tokenizer_hash

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Index of each block's first sample, and n_samples at the end [n_blocks + 1]."""
        return self.indexes.blocks

    @property
    def n_blocks(self) -> int:
        """Number of blocks in all shards."""
        return len(self.blocks) - 1

    @property
    def n_samples(self) -> int:
        """Number of documents in all shards."""
        return int(self.blocks[-1])

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all shards, from the manifest, before packing adds or cuts any."""
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def n_text_bytes(self) -> int:
        """Number of UTF-8 bytes of text, for bits per byte."""
        return sum(shard.text_bytes for shard in self.manifest.shards)

    def lengths(self, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return the token count [n] of each sample in blocks `begin` to `end` − 1 (default: all), from the index."""
        end = self.n_blocks if end is None else end
        first = int(self.blocks[begin])
        lengths = np.empty(int(self.blocks[end]) - first, np.int64)
        shard_of = self.indexes.first_blocks.searchsorted
        for shard in range(int(shard_of(begin, "right")) - 1, int(shard_of(end, "left"))):
            tokens = self.indexes[shard].samples["tokens"]
            shard_start = int(self.blocks[self.indexes.first_blocks[shard]]) - first
            part_tokens = tokens[max(-shard_start, 0) : len(lengths) - shard_start]
            lengths[max(shard_start, 0) : max(shard_start, 0) + len(part_tokens)] = part_tokens
        return lengths

    def check_tokenizer(self, tokenizer_hash: str) -> None:
        """Raise a UsageError unless the corpus was written with the tokenizer of this hash."""
        if self.tokenizer_hash == NO_TOKENIZER and tokenizer_hash != NO_TOKENIZER:
            raise UsageError(f"{self.folder}: holds no tokens of text: prepare it with tokenizer.file, or give another")
        if tokenizer_hash != self.tokenizer_hash:
            raise UsageError(
                f"{self.folder}: was written with tokenizer {self.tokenizer_hash[:16]}, but the one given is "
                f"{tokenizer_hash[:16]}: use the tokenizer beside the corpus, or prepare it again"
            )

    def read_block(self, block: int) -> list[tuple[int, NDArray[Any]]]:
        """Read a block as a list of (sample index, read-only tokens [n] in the stored type)."""
        *_, tokens = self._read(block)
        return list(enumerate(tokens, start=int(self.blocks[block])))

    def read_blocks(self, blocks: Sequence[int]) -> list[list[tuple[int, NDArray[Any]]]]:
        """Read several blocks of compressed shards into one buffer, which is faster than one by one."""
        locations = [self._locate_block(block) for block in blocks]
        compressed = [self.read_frame(block) for block in blocks]
        sizes = [int(self.indexes[shard].frames["uncompressed"][frame]) for shard, frame in locations]
        contents: Sequence[bytes | memoryview]
        try:
            contents = decompress_frames(compressed, sizes)
        except BadFrameError:  # decompressed one by one, to find the damaged frame and its error
            contents = [
                self._decompress_frame(*location, data) for location, data in zip(locations, compressed, strict=True)
            ]
        return [
            list(enumerate(self._view_tokens(block, data), start=int(self.blocks[block])))
            for block, data in zip(blocks, contents, strict=True)
        ]

    def is_uncompressed(self, block: int) -> bool:
        """Return True if a block lies in an uncompressed tar, so that single samples can be read."""
        return self.manifest.shards[self._locate_block(block)[0]].is_raw

    def verify(self, block: int) -> None:
        """Verify a block against the index, as its first read does."""
        self._read(block)

    def is_verified(self, block: int) -> bool:
        """Return True if a block was verified against the index since the corpus was opened."""
        return bool(self._verified[block])

    def prefetch_block(self, block: int) -> None:
        """Ask the operating system to read a block ahead, if it can."""
        if not hasattr(os, "posix_fadvise"):  # as on macOS
            return
        shard, frame = self._locate_block(block)
        offset, end = self.indexes[shard].offsets[frame : frame + 2].tolist()
        descriptor = self.store.open(self.manifest.shards[shard])
        try:
            os.posix_fadvise(descriptor, offset, end - offset, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def read_samples(self, block: int, rows: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield samples `rows` of a verified block that `is_uncompressed`, as `read_block` does, each read lazily."""
        shard, frame = self._locate_block(block)
        entry, index, dtype = self.manifest.shards[shard], self.indexes[shard], self.manifest.dtype
        entries = index.frame_samples(frame)
        starts = (index.offsets[frame] + entries["offset"]).tolist()
        sizes = (entries["tokens"].astype(np.int64) * dtype.itemsize).tolist()
        first, path, descriptor = int(self.blocks[block]), self.shard_path(shard), self.store.open(entry)
        try:
            for row in rows:
                data = read_at(descriptor, path, starts[row], sizes[row], self.store.remedy)
                yield first + row, np.frombuffer(data, dtype)
        finally:
            os.close(descriptor)

    def read_block_samples(self, block: int) -> list[Sample]:
        """Read the samples of a block with all stored fields; verifies every byte against the index."""
        shard, frame, data, arrays = self._read(block, verify=True)
        index, shard_entry = self.indexes.complete(shard), self.manifest.shards[shard]
        dtype = self.manifest.dtype
        if index.is_packed_frame(frame, dtype.itemsize):
            return self._decode_packed_frame(block, shard, frame, data, arrays)
        samples: list[Sample] = []
        offset = 0
        for sample in range(*index.first_samples[frame : frame + 2]):
            entry = index.samples[sample]
            key = entry["key"].decode("ascii", "replace")
            tokens = arrays[len(samples)]
            try:
                if shard_entry.files_only:
                    samples.append(self._read_image_sample(block, len(samples), shard, frame, data, tokens))
                    continue
                if shard_entry.foreign:
                    name = check_external_sample(data, int(entry["offset"]), len(tokens), dtype)
                    source = f"{shard_entry.file}/{name}"
                    samples.append(Sample(int(self.blocks[block]) + len(samples), key, source, 0, tokens))
                    continue
                if entry["offset"] != offset + PAYLOAD_OFFSET:
                    raise MegatfmError(f"it should start at byte {offset} of its frame")
                source, text_bytes, members, fields, offset = decode_sample(data, offset, key, len(tokens), dtype)
                if text_bytes != entry["text_bytes"]:
                    raise MegatfmError(f"its text has {text_bytes} bytes, not {entry['text_bytes']}")
            except MegatfmError as error:
                raise self._make_damage_error(shard, frame, str(error), sample) from error
            sample_index = int(self.blocks[block]) + len(samples)
            samples.append(Sample(sample_index, key, source, text_bytes, tokens, members, fields))
        if not shard_entry.foreign:
            self._check_end(shard, frame, data, offset)
        return samples

    def _read_image_sample(
        self, block: int, row: int, shard: int, frame: int, data: bytes, tokens: NDArray[Any]
    ) -> Sample:
        """Read a sample of an image tar: its files, with the class index from the manifest's label rule."""
        index = self.indexes.complete(shard)
        entries = index.frame_samples(frame)
        starts = [*(entries["offset"][row : row + 2].astype(np.int64) - PAYLOAD_OFFSET).tolist(), len(data)]
        key = entries["key"][row].decode("ascii", "replace")
        image_sample = read_image_files(data, starts[0], starts[1], self.shard_path(shard))
        source = f"{self.manifest.shards[shard].file}/{image_sample.key}"
        return Sample(int(self.blocks[block]) + row, key, source, 0, tokens, self._labels.apply(image_sample.files))

    def _decode_packed_frame(
        self, block: int, shard: int, frame: int, data: bytes, arrays: list[NDArray[Any]]
    ) -> list[Sample]:
        """Decode the samples of a block that share one tar member."""
        index = self.indexes.complete(shard)
        entries = index.frame_samples(frame)
        keys = [key.decode("ascii", "replace") for key in entries["key"].tolist()]
        try:
            counts = entries["tokens"].tolist()
            sources, sizes, fields, end = decode_packed_documents(data, keys, counts, self.manifest.dtype)
            if sizes != entries["text_bytes"].tolist():
                raise MegatfmError("its texts have other numbers of bytes than the index says")
        except MegatfmError as error:
            raise self._make_damage_error(shard, frame, str(error)) from error
        self._check_end(shard, frame, data, end)
        first = int(self.blocks[block])
        documents = zip(keys, sources, sizes, arrays, strict=True)
        return [
            Sample(first + row, *document, {}, metadata)
            for row, (document, metadata) in enumerate(zip(documents, fields, strict=True))
        ]

    def _check_end(self, shard: int, frame: int, data: bytes, end: int) -> None:
        if data[end:].strip(b"\0"):
            raise self._make_damage_error(shard, frame, f"unknown data after byte {end} of the frame")

    def read_sample(self, sample: int) -> Sample:
        """Read one sample by its index. Raises a UsageError if the index is out of range."""
        if not 0 <= sample < self.n_samples:
            raise UsageError(f"{self.folder}: has samples 0 to {self.n_samples - 1}, not {sample}")
        block = int(np.searchsorted(self.blocks, sample, side="right")) - 1
        return self.read_block_samples(block)[sample - int(self.blocks[block])]

    def describe_sample(self, sample: int) -> tuple[str, str]:
        """Return two texts for an error: where a sample lies, and how to train without it."""
        block = int(np.searchsorted(self.blocks, sample, side="right")) - 1
        shard, frame = self._locate_block(block)
        keys = self.indexes.complete(shard).samples["key"]
        name = keys[sample - int(self.blocks[self.indexes.first_blocks[shard]])].decode("ascii", "replace")
        return (
            f"{self.shard_path(shard)}: sample {sample} (key {name}, frame {frame})",
            f'; to train without it, put "{sample}" into the corpus\'s quarantine (data.quarantine)',
        )

    def read_frame(self, block: int) -> bytes:
        """Return a block's bytes as they lie in its shard: one frame, compressed unless the shard is a plain tar."""
        shard, frame = self._locate_block(block)
        offset, end = map(int, self.indexes[shard].offsets[frame : frame + 2])
        return self.store.read(self.manifest.shards[shard], offset, end - offset)

    def shard_blocks(self, shard: int) -> range:
        """Return the indexes of a shard's blocks."""
        return range(*map(int, self.indexes.first_blocks[shard : shard + 2]))

    def find_shard(self, block: int) -> tuple[int, range]:
        """Return the number of the shard that has a block, and the indexes of its blocks."""
        shard = self._locate_block(block)[0]
        return shard, self.shard_blocks(shard)

    def _locate_block(self, block: int) -> tuple[int, int]:
        if not 0 <= block < self.n_blocks:
            raise MegatfmError(f"{self.folder}: has blocks 0 to {self.n_blocks - 1}, not {block}")
        shard = int(np.searchsorted(self.indexes.first_blocks, block, side="right")) - 1
        return shard, block - int(self.indexes.first_blocks[shard])

    def _read(self, block: int, verify: bool = False) -> tuple[int, int, bytes, list[NDArray[Any]]]:
        """Return a block's shard, frame within it, uncompressed bytes, and token arrays (see `_view_tokens`)."""
        shard, frame = self._locate_block(block)
        data = self.read_frame(block)
        if not self.manifest.shards[shard].is_raw:
            data = self._decompress_frame(shard, frame, data)
        return shard, frame, data, self._view_tokens(block, data, verify)

    def _view_tokens(self, block: int, data: bytes | memoryview, verify: bool = False) -> list[NDArray[Any]]:
        """Return the tokens [n] of each sample of a block, as views of `data`.

        The first read of a block verifies it; verify: do so even if an earlier read has.
        """
        shard, frame = self._locate_block(block)
        index, dtype = self.indexes[shard], self.manifest.dtype
        if verify or not self._verified[block]:
            self._verify(shard, frame, bytes(data))
            self._verified[block] = True
        entries = index.frame_samples(frame)
        # Slicing one array is faster than making one per sample. The index has checked that samples start at whole
        # tokens.
        tokens = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
        starts, lengths = (entries["offset"] // dtype.itemsize).tolist(), entries["tokens"].tolist()
        return [tokens[begin : begin + n] for begin, n in zip(starts, lengths, strict=True)]

    def _verify(self, shard: int, frame: int, data: bytes) -> None:
        """Raise a MegatfmError if a frame's hash, where the index has one, or its samples' offsets differ from it."""
        index, dtype = self.indexes[shard], self.manifest.dtype
        if index.frame_hashes is not None and hash_frame(data) != index.frame_hashes[frame]:
            raise self._make_damage_error(shard, frame, "its hash is not the index's")
        first, end = index.first_samples[frame : frame + 2].tolist()
        entries = index.samples[first:end]
        if self.manifest.shards[shard].files_only:
            return  # the hash is enough
        if index.is_packed_frame(frame, dtype.itemsize):
            counts = entries["tokens"].astype(np.int64)
            starts = PAYLOAD_OFFSET + (np.cumsum(counts) - counts) * dtype.itemsize
            header = make_npy_header(dtype, int(counts.sum()))
            if (entries["offset"] != starts).any() or not data.startswith(header, tarfile.BLOCKSIZE):
                raise self._make_damage_error(shard, frame, f"no array of {counts.sum()} {dtype} for all its samples")
            return
        for sample, start, n in zip(
            range(first, end), entries["offset"].tolist(), entries["tokens"].tolist(), strict=True
        ):
            if not data.startswith(make_npy_header(dtype, n), start - NPY_HEADER_BYTES):
                reason = f"no array of {n} {dtype} at byte {start} of the frame"
                raise self._make_damage_error(shard, frame, reason, sample)

    def _decompress_frame(self, shard: int, frame: int, compressed: bytes) -> bytes:
        try:
            return decompress_frame(compressed, int(self.indexes[shard].frames["uncompressed"][frame]))
        except BadFrameError as error:
            raise self._make_damage_error(shard, frame, str(error)) from error

    def shard_path(self, shard: int) -> Path:
        """Return the path of a shard, or of its copy if it is remote."""
        return self.store.path(self.manifest.shards[shard])

    def _make_damage_error(self, shard: int, frame: int, reason: str, sample: int | None = None) -> MegatfmError:
        block = int(self.indexes.first_blocks[shard]) + frame
        first = int(self.blocks[self.indexes.first_blocks[shard]])
        samples = f"samples {self.blocks[block]} to {self.blocks[block + 1] - 1}"
        sample_name = samples if sample is None else f"sample {first + sample}"
        location = f"{sample_name} in frame {frame} at byte {self.indexes[shard].offsets[frame]}"
        block_samples = f'"{self.blocks[block]}-{self.blocks[block + 1] - 1}"'
        return MegatfmError(
            f"{self.shard_path(shard)}: {location}: damaged: {reason}: {self.store.remedy}; to train without them, put "
            f"{block_samples} into the corpus's quarantine (data.quarantine)"
        )
