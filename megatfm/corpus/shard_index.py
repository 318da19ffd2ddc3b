"""The sidecar index of a shard: where each frame and each sample's tokens lie, without reading the shard.

On disk: one zstd frame that holds a line of JSON (counts), an array of `FRAME_DTYPE` and an array of samples.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.files import write_whole
from megatfm.corpus.manifest import CorpusShard, IndexFile
from megatfm.errors import MegatfmError

# A sample's frame is held in memory as a whole, so a damaged or hostile size must not pass.
MAX_FRAME_BYTES = 2**30
MAX_KEY_LENGTH = 80
NPY_HEADER_BYTES = 128
"""Length of the header before the tokens of a sample."""

# Frames follow one another without gaps, so their offsets are the running sums of `compressed`.
FRAME_DTYPE = np.dtype([("compressed", "<u4"), ("uncompressed", "<u4"), ("samples", "<u4")])


IMAGE_SIZES, IMAGE_COUNTS = ("height", "width"), ("images",)
"""Columns of samples with one image each, and of those with several."""


def make_sample_dtype(key_width: int, image_columns: Sequence[str] = ()) -> np.dtype[Any]:
    """Return the type of an index's table of samples.

    `offset`: start of the tokens in the uncompressed frame; `tokens`: their number; `text_bytes`: UTF-8 bytes of the
    sample's text; `height`, `width`: pixels of its upright image, if every sample has one; `images`: number of its
    images, if a sample has several.
    """
    image = [(column, "<u4") for column in image_columns]
    columns = [("offset", "<u4"), ("tokens", "<u4"), ("text_bytes", "<u8"), ("key", f"S{key_width}")]
    return np.dtype(columns + image)


# The columns that reading a sample's tokens needs.
SPAN_DTYPE = np.dtype([("offset", "<u4"), ("tokens", "<u4")])


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The tables of a shard's index, in stored order.

    frames [n_frames]: of type `FRAME_DTYPE`. samples [n_samples]: of a type of `make_sample_dtype`, or `SPAN_DTYPE`.
    """

    frames: NDArray[Any]
    samples: NDArray[Any]
    frame_hashes: NDArray[np.uint64] | None = None
    """`hash_frame` of each frame's uncompressed bytes, in shards whose frames may lack checksums."""
    has_packed_frames: bool = False
    """True if a frame may hold many documents in one tar member."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory of both tables."""
        return self.frames.nbytes + self.samples.nbytes

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Byte offsets [n_frames + 1] at which frames start in the shard; the last is the shard's size."""
        return compute_running_sum(self.frames["compressed"])

    @cached_property
    def first_samples(self) -> NDArray[np.int64]:
        """Index [n_frames + 1] of each frame's first sample within the shard; the last is the number of samples."""
        return compute_running_sum(self.frames["samples"])

    def frame_samples(self, frame: int) -> NDArray[Any]:
        """Return the rows of `samples` that belong to a frame."""
        return self.samples[slice(*self.first_samples[frame : frame + 2].tolist())]

    @property
    def has_image_sizes(self) -> bool:
        """True if the index holds the image size of every sample."""
        return "height" in (self.samples.dtype.names or ())

    @property
    def has_image_counts(self) -> bool:
        """True if the index holds the number of images of every sample."""
        return "images" in (self.samples.dtype.names or ())

    def without_keys(self) -> "ShardIndex":
        """Return a copy with only the samples' spans, which take 8 bytes each; keys and text sizes take 20 more."""
        spans = np.empty(len(self.samples), SPAN_DTYPE)
        for name in SPAN_DTYPE.fields or ():
            spans[name] = self.samples[name]
        hashes = None if self.frame_hashes is None else self.frame_hashes.copy()
        return ShardIndex(self.frames.copy(), spans, hashes, self.has_packed_frames)

    def is_packed_frame(self, frame: int, token_bytes: int) -> bool:
        """Return True if the documents of a frame share one tar member."""
        if not self.has_packed_frames or self.frames["samples"][frame] == 1:
            return False
        samples = self.frame_samples(frame)
        first, second = samples["offset"][:2].tolist()
        return bool(second - first == int(samples["tokens"][0]) * token_bytes)

    def save(self, path: Path) -> IndexFile:
        """Write the index file; return its entry in a manifest."""
        data = self.encode()
        write_whole(path, data)
        return IndexFile(file=path.name, bytes=len(data), blake3=blake3(data).hexdigest())

    def encode(self) -> bytes:
        """Return the content of an index file, zstd with a checksum: a JSON line of counts, then the shard's tables."""
        counts = {
            "schema_version": self._schema_version,
            "frames": len(self.frames),
            "samples": len(self.samples),
            "key_width": self.samples.dtype["key"].itemsize,
        }
        content = json.dumps(counts).encode() + b"\n" + self.frames.tobytes() + self.samples.tobytes()
        content += b"" if self.frame_hashes is None else self.frame_hashes.tobytes()
        return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(content)

    @property
    def _schema_version(self) -> int:
        if self.has_image_sizes or self.has_image_counts:
            return 4 if self.has_image_sizes else 5
        return 3 if self.has_packed_frames else 1 if self.frame_hashes is None else 2

    @classmethod
    def decode(cls, data: bytes, shard: CorpusShard, token_bytes: int) -> "ShardIndex":
        """Read an index and check it against its shard's entry in the manifest.

        Raises a MegatfmError whose message is only the reason; the caller adds the file.
        """
        max_bytes = 256 + shard.samples * (
            FRAME_DTYPE.itemsize + 8 + make_sample_dtype(MAX_KEY_LENGTH, IMAGE_SIZES).itemsize
        )
        try:
            if not 0 < zstandard.frame_content_size(data) <= max_bytes:
                raise MegatfmError("its uncompressed size is absurd")
            content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
            counts_end = content.index(b"\n") + 1
            counts = json.loads(content[:counts_end])
            known_versions = ((4,) if shard.files_only else (2,)) if shard.foreign else (1, 3, 4, 5)
            if (schema_version := counts["schema_version"]) not in known_versions:
                raise MegatfmError(
                    f"schema version {schema_version!r} is not known here, only 1, 3, 4 and 5 (foreign: 2 and 4)"
                )
            has_hashes = shard.foreign or (shard.is_raw and schema_version in (3, 4, 5))
            n_frames, n_samples, key_width = (int(counts[n]) for n in ("frames", "samples", "key_width"))
            if min(n_frames, n_samples) < 0 or not 1 <= key_width <= MAX_KEY_LENGTH:
                raise MegatfmError(f"its counts are absurd: {counts}")
            samples = make_sample_dtype(key_width, {4: IMAGE_SIZES, 5: IMAGE_COUNTS}.get(schema_version, ()))
            samples_at = counts_end + n_frames * FRAME_DTYPE.itemsize
            hashes_at = samples_at + n_samples * samples.itemsize
            index = cls(
                np.frombuffer(content, FRAME_DTYPE, n_frames, counts_end),
                np.frombuffer(content, samples, n_samples, samples_at),
                np.frombuffer(content, "<u8", n_frames, hashes_at) if has_hashes else None,
                schema_version == 3,
            )
        except (zstandard.ZstdError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise MegatfmError(f"not a readable index ({error})") from error
        if len(content) - counts_end != index.nbytes + (8 * n_frames if has_hashes else 0):
            raise MegatfmError("it is longer than its counts say")
        index._check(shard, token_bytes)
        return index

    def _check(self, shard: CorpusShard, token_bytes: int) -> None:
        frames, samples = self.frames, self.samples
        expected = (shard.samples, shard.samples, shard.tokens, shard.text_bytes, shard.bytes)
        actual = (
            len(samples),
            int(frames["samples"].sum(dtype=np.int64)),
            int(samples["tokens"].sum(dtype=np.int64)),
            int(samples["text_bytes"].sum()),
            int(self.offsets[-1]),
        )
        if actual != expected:
            raise MegatfmError(
                f"it disagrees with the manifest on (samples, samples in frames, tokens, text bytes, bytes): "
                f"{actual}, not {expected}"
            )
        if (frames["samples"] == 0).any():
            raise MegatfmError(f"frame {int((frames['samples'] == 0).argmax())} holds no sample")
        if shard.is_raw and (frames["compressed"] != frames["uncompressed"]).any():
            raise MegatfmError("a frame of a plain tar has two sizes")
        claimed = np.maximum(frames["uncompressed"], frames["compressed"])
        if claimed.max() > MAX_FRAME_BYTES:
            raise MegatfmError(f"frame {claimed.argmax()} claims {claimed.max()} bytes, over {MAX_FRAME_BYTES}")
        ends = samples["offset"] + samples["tokens"].astype(np.int64) * token_bytes
        is_outside = ends > np.repeat(frames["uncompressed"], frames["samples"])
        if is_outside.any():
            raise MegatfmError(f"sample {int(is_outside.argmax())} ends outside its frame")
        offsets = samples["offset"]
        is_misaligned = (offsets < NPY_HEADER_BYTES) | (offsets % token_bytes != 0)
        if is_misaligned.any():
            raise MegatfmError(f"sample {int(is_misaligned.argmax())} starts where none can")


def hash_frame(data: bytes | memoryview) -> int:
    """Return the first 8 bytes of a frame's BLAKE3 hash, as a little-endian integer."""
    return int.from_bytes(blake3(data).digest(8), "little")


def compute_running_sum(counts: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the cumulative sums [n + 1] of counts [n], starting with 0."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
