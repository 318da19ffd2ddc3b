"""Write a corpus: tar shards of independently compressed frames, an index for each, and the manifest last."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.files import AtomicFile, check_local
from megatfm.corpus.images import measure_images
from megatfm.corpus.manifest import (
    DEFAULT_FRAME_BYTES,
    INDEX_NAME,
    MANIFEST,
    SHARD_NAME,
    CorpusShard,
    Manifest,
    TokenDtype,
)
from megatfm.corpus.shard_format import (
    END_OF_ARCHIVE,
    EXTENSION,
    KEY,
    PAYLOAD_OFFSET,
    Sample,
    encode_packed_documents,
    encode_sample,
)
from megatfm.corpus.shard_index import (
    FRAME_DTYPE,
    IMAGE_COUNTS,
    IMAGE_SIZES,
    MAX_FRAME_BYTES,
    ShardIndex,
    hash_frame,
    make_sample_dtype,
)
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import fsync_directory, name_write_errors

_OWN_FILE_NAME = re.compile(rf"{SHARD_NAME}|{INDEX_NAME}|\.({SHARD_NAME}|{INDEX_NAME}|{re.escape(MANIFEST)})\.partial")


class ShardWriter:
    """Writes samples, in the order in which they are added, as a corpus in `folder`.

    The same samples give the same bytes. The folder is a corpus once `finish` has written the manifest. Leaving a
    `with` block without `finish` removes the shard in progress.

    - token_dtype: stored type of tokens; an id that does not fit is an error.
    - shard_bytes, frame_bytes: uncompressed tar bytes after which a shard or a frame ends. A frame is the unit of
      reading. A sample is never split, so a larger sample makes a larger frame.
    - compress: write `.tar.zst`, not plain `.tar`.
    - pack: let documents without files share the two members of a frame. Else each has two of its own, with 1.5 KiB of
      headers and padding.
    - on_file_written: called with the path of each complete file, which it may remove.

    Raises a UsageError if `folder` is a URL or holds a corpus already.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tokenizer_hash: str,
        token_dtype: TokenDtype,
        shard_bytes: int = 2**28,
        frame_bytes: int = DEFAULT_FRAME_BYTES,
        compress: bool = True,
        pack: bool = True,
        on_file_written: Callable[[Path], None] = lambda path: None,
    ) -> None:
        check_local(folder)
        self.folder = Path(folder)
        self._options = _ShardOptions(frame_bytes, compress, pack)
        self._tokenizer_hash = tokenizer_hash
        self._token_dtype: TokenDtype = token_dtype
        self._dtype = np.dtype(token_dtype).newbyteorder("<")
        self._max_token = int(np.iinfo(self._dtype).max)
        self._shard_bytes = shard_bytes
        self._on_file_written = on_file_written
        self._shards: list[CorpusShard] = []
        self._open_shard: _OpenShard | None = None
        with name_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).exists():
            raise UsageError(f"{self.folder}: already holds a corpus: delete it or choose another folder")

    def add(
        self,
        key: str,
        tokens: NDArray[Any],
        source: str,
        text_bytes: int,
        members: Mapping[str, bytes] = MappingProxyType({}),
        fields: Mapping[str, Any] = MappingProxyType({}),
        side_lengths: tuple[int, int] | None = None,
    ) -> None:
        """Append a sample: `tokens` [n] of a text of `text_bytes` UTF-8 bytes that was read from `source`.

        key: name of the sample in the tar, up to 80 letters, digits, `_` and `-`; unique in a shard. members: its files
        by extension, up to 16 lower-case letters and digits, such as `{"jpg": data}`, or `{"0.jpg": data}` where there
        are several; a shard's index holds the sizes of images if all its samples have one, and their numbers if a
        sample has several. fields: metadata, as JSON. side_lengths: two numbers in place of the size of an image.

        Raises a MegatfmError if a value breaks these rules, or an id doesn't fit `token_dtype`.
        """
        if not KEY.fullmatch(key):
            raise MegatfmError(f"sample key {key!r}: use 1 to 80 letters, digits, '_' and '-'")
        for extension in members:
            if not EXTENSION.fullmatch(extension):
                raise MegatfmError(f"sample {key}: member {extension!r}: use 1 to 16 small letters and digits")
        sample = Sample(0, key, source, text_bytes, self._to_stored_dtype(key, tokens), members, fields)
        image_size, n_images = measure_images(members)
        data = None if self._options.pack and not members else encode_sample(sample)
        pending = _PendingSample(sample, data, side_lengths or image_size, n_images)
        if pending.size + len(END_OF_ARCHIVE) > MAX_FRAME_BYTES:
            raise MegatfmError(f"sample {key} ({source}) takes over {MAX_FRAME_BYTES} bytes: cut its text")
        if self._open_shard is not None and self._open_shard.written + pending.size > self._shard_bytes:
            self._close_shard()
        if self._open_shard is None:
            self._open_shard = _OpenShard(self.folder, len(self._shards), self._options)
        self._open_shard.add(pending)

    def has_key(self, key: str) -> bool:
        """Return whether a sample of the shard in progress has this key."""
        return self._open_shard is not None and self._open_shard.has_key(key)

    def finish(self, provenance: Mapping[str, Any]) -> Manifest:
        """Commit the corpus: close the last shard, remove files of an interrupted run, write the manifest.

        provenance: how the corpus was made, as JSON. Raises a UsageError if no sample was added.
        """
        if self._open_shard is None:
            raise UsageError(f"{self.folder}: no document was added, so there is no corpus to write")
        self._close_shard()
        manifest = Manifest(
            token_dtype=self._token_dtype,
            tokenizer_hash=self._tokenizer_hash,
            shards=tuple(self._shards),
            provenance=dict(provenance),
        )
        current_files = {name for shard in self._shards for name in (shard.file, shard.index.file)}
        with name_write_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name not in current_files and _OWN_FILE_NAME.fullmatch(path.name):
                    path.unlink()
            fsync_directory(self.folder)
        manifest.save(self.folder)
        self._on_file_written(self.folder / MANIFEST)
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open_shard is not None:
            self._open_shard.discard()
            self._open_shard = None

    def _to_stored_dtype(self, key: str, tokens: NDArray[Any]) -> NDArray[Any]:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise MegatfmError(f"sample {key}: tokens are {tokens.dtype}{list(tokens.shape)}, not integers [n]")
        min_token, max_token = int(tokens.min(initial=0)), int(tokens.max(initial=0))
        if min_token < 0 or max_token > self._max_token:
            raise MegatfmError(
                f"sample {key}: token id {min_token if min_token < 0 else max_token} does not fit {self._dtype}"
            )
        return tokens.astype(self._dtype)

    def _close_shard(self) -> None:
        assert self._open_shard is not None
        shard = self._open_shard.commit()
        self._shards.append(shard)
        self._open_shard = None
        for name in (shard.file, shard.index.file):
            self._on_file_written(self.folder / name)


class _ShardOptions(NamedTuple):
    frame_bytes: int
    compress: bool
    pack: bool


class _PendingSample(NamedTuple):
    """A sample of the frame in progress."""

    sample: Sample
    data: bytes | None
    """Its encoded members; None if it may share members with others."""
    image_size: tuple[int, int] | None = None
    n_images: int | None = None

    @property
    def size(self) -> int:
        """Bytes that it adds to a frame; an estimate for shared members."""
        if self.data is not None:
            return len(self.data)
        sample = self.sample
        metadata_bytes = len(json.dumps(dict(sample.metadata))) if sample.metadata else 0
        return sample.tokens.nbytes + len(sample.source) + len(sample.key) + metadata_bytes + 16


class _OpenShard:
    """The shard in progress: the last frame in memory, the ones before it in the file."""

    def __init__(self, folder: Path, index: int, options: _ShardOptions) -> None:
        self._index_path = folder / f"shard-{index:06d}.index.zst"
        self._file = AtomicFile(folder / f"shard-{index:06d}.tar{'.zst' if options.compress else ''}")
        self._options = options
        # The checksum lets a reader notice damage in the one frame that it reads.
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._frame: list[_PendingSample] = []
        self._frame_bytes = 0
        self._frames: list[tuple[int, int, int]] = []
        self._hashes: list[int] = []
        self._has_packed_frames = False
        self._samples: dict[str, tuple[int, int, int]] = {}
        self._image_sizes: list[tuple[int, int]] = []
        self._image_counts: list[int] = []
        self.written = 0

    def add(self, pending: _PendingSample) -> None:
        sample, size = pending.sample, pending.size
        if sample.key in self._samples:
            raise MegatfmError(f"sample key {sample.key}: used twice in {self._file.path}")
        if self._frame and (
            self._frame_bytes + size > self._options.frame_bytes
            or (pending.data is None) != (self._frame[-1].data is None)
        ):
            self._end_frame()
        # Its offset is known when the frame ends.
        self._samples[sample.key] = (0, len(sample.tokens), sample.text_bytes)
        self._image_sizes += [pending.image_size] if pending.image_size else []
        self._image_counts += [] if pending.n_images is None else [pending.n_images]
        self._frame.append(pending)
        self._frame_bytes += size
        self.written += size

    def has_key(self, key: str) -> bool:
        return key in self._samples

    def commit(self) -> CorpusShard:
        self._end_frame(END_OF_ARCHIVE)
        self._file.commit()
        image_columns, images = self._image_table()
        rows = [
            (*location, key.encode(), *image)
            for (key, location), image in zip(self._samples.items(), images, strict=True)
        ]
        index = ShardIndex(
            np.array(self._frames, FRAME_DTYPE),
            np.array(rows, make_sample_dtype(max(map(len, self._samples)), image_columns)),
            None if self._options.compress else np.array(self._hashes, "<u8"),
            self._has_packed_frames or not self._options.compress,
        )
        return CorpusShard(
            file=self._file.path.name,
            bytes=self._file.size,
            blake3=self._file.blake3,
            samples=len(rows),
            tokens=sum(n for _, n, _ in self._samples.values()),
            text_bytes=sum(n for _, _, n in self._samples.values()),
            index=index.save(self._index_path),
            frame_bytes=DEFAULT_FRAME_BYTES if self._options.compress else self._options.frame_bytes,
        )

    def discard(self) -> None:
        self._file.discard()

    def _image_table(self) -> tuple[Sequence[str], list[tuple[int, ...]]]:
        """Return the names of the index's columns on images, and their values for each sample."""
        n_samples, counts = len(self._samples), self._image_counts
        if len(counts) == n_samples and max(counts) > 1 and not self._has_packed_frames:
            return IMAGE_COUNTS, [(count,) for count in counts]
        if len(self._image_sizes) == n_samples and not self._has_packed_frames:
            return IMAGE_SIZES, list(self._image_sizes)
        return (), [()] * n_samples

    def _end_frame(self, end: bytes = b"") -> None:
        data = self._encode_frame() + end
        stored = self._compressor.compress(data) if self._options.compress else data
        self._frames.append((len(stored), len(data), len(self._frame)))
        if not self._options.compress:
            self._hashes.append(hash_frame(data))
        self._file.write(stored)
        self._frame, self._frame_bytes = [], 0

    def _encode_frame(self) -> bytes:
        """Return the frame's tar members, and record where each sample's tokens start in them."""
        offset, parts = PAYLOAD_OFFSET, []
        packed = self._frame[0].data is None and len(self._frame) > 1
        for sample, data, *_ in self._frame:
            _, *counts = self._samples[sample.key]
            self._samples[sample.key] = (offset, counts[0], counts[1])
            if packed:
                offset += sample.tokens.nbytes
            else:
                parts.append(data or encode_sample(sample))
                offset += len(parts[-1])
        self._has_packed_frames |= packed
        return encode_packed_documents([part.sample for part in self._frame]) if packed else b"".join(parts)
