"""Index foreign shards of token ids where they are if possible, or rewrite them as shards of our own.

A foreign shard is a `.tar` or `.tar.zst` of samples as WebDataset writes them, each with one array of token ids
(`KEY.npy` or `KEY.NAME.npy`). Nothing is extracted and no pickle is loaded. A shard with anything but plain files and
folders is refused.
"""

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import zstandard

from megatfm.corpus.files import get_regular_file_size, open_regular_file
from megatfm.corpus.manifest import DEFAULT_FRAME_BYTES, FOREIGN_SHARD, MANIFEST, CorpusShard, Manifest, TokenDtype
from megatfm.corpus.safe_tar import STORED_DTYPES, TokenArray, iter_shard_samples, iter_tar_samples
from megatfm.corpus.shard_format import KEY
from megatfm.corpus.shard_index import FRAME_DTYPE, MAX_FRAME_BYTES, ShardIndex, hash_frame, make_sample_dtype
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import MegatfmError, RefusedMemberError, UsageError
from megatfm.files import hash_content
from megatfm.terminal import format_counted, log_progress

FRAME_BYTES = 2**18
CHUNK_BYTES = 2**14
"""Compressed bytes given to zstd at once: 16 KiB decompress to at most some hundred MiB."""


@dataclass(frozen=True)
class IndexReport:
    """Outcome of `index_folder`."""

    manifest: Manifest
    folder: Path
    rewritten: bool

    def __str__(self) -> str:
        shards = self.manifest.shards
        outcome = "written again" if self.rewritten else "indexed where they are"
        return (
            f"{self.folder}: {format_counted(len(shards), 'shard')} with "
            f"{format_counted(sum(s.samples for s in shards), 'sample')}, "
            f"{format_counted(sum(s.tokens for s in shards), 'token')}, {outcome}"
        )


def index_folder(folder: Path, tokenizer_hash: str, out: Path | None = None) -> IndexReport:
    """Turn a folder of foreign shards into a corpus: where they are, or rewritten as our own shards in `out`.

    Raises a UsageError if there are no shards, if they hold no tokens, or if they can't be read at random where they
    are. Raises a MegatfmError that names shard, member and offset if something is damaged or malicious.
    """
    paths = list_foreign_shards(folder)
    if out is not None:
        return IndexReport(_rewrite(paths, tokenizer_hash, out), out, True)
    shards, dtypes = [], set()
    for path in log_progress(paths, "indexed", "file"):
        shard, dtype = _index_shard(path)
        shards.append(shard)
        dtypes.add(dtype)
    if len(dtypes) > 1:
        raise _needs_rewrite_error(folder, f"shards hold {' and '.join(sorted(dtypes))}")
    manifest = Manifest(
        token_dtype=STORED_DTYPES[dtypes.pop()],
        tokenizer_hash=tokenizer_hash,
        shards=tuple(shards),
        provenance={"indexed": "megatfm data index"},
    )
    manifest.save(folder)
    return IndexReport(manifest, folder, False)


def list_foreign_shards(folder: Path) -> list[Path]:
    """Return the tars of a folder that is no corpus yet, sorted. Raises a UsageError if they can't be indexed."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder}: already holds a {MANIFEST}, so it is indexed: look at it with `megatfm data show`")
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(FOREIGN_SHARD, path.name))
    if not paths:
        raise UsageError(f"{folder}: has no shards (.tar or .tar.zst); `megatfm prep` reads other files")
    path_by_index: dict[str, Path] = {}
    for path in paths:
        first_path = path_by_index.setdefault(make_index_name(path), path)
        if first_path != path:
            raise UsageError(
                f"{path}: {first_path.name} lies beside it, and an index is named without .tar or .tar.zst: "
                "rename one, or delete it if it is a copy"
            )
    return paths


def make_index_name(path: Path) -> str:
    """Return the name of a foreign shard's index, which lies in the same folder."""
    return re.sub(r"\.tar(\.zst)?$", ".index.zst", path.name)


def _index_shard(path: Path) -> tuple[CorpusShard, str]:
    """Write the index of a shard; return its entry in a manifest, and its tokens' NumPy type, such as "<u2"."""
    frames: list[tuple[int, int, int]] = []
    rows: list[tuple[int, int, int, bytes]] = []
    hashes: list[int] = []
    dtypes, keys = set[str](), set[str]()
    for compressed, data, arrays in _iter_frames(path):
        for array in _check_unique_keys(arrays, keys, path):
            if not array.has_native_layout:
                raise _needs_rewrite_error(
                    path, f"sample {array.key!r} is {array.tokens.dtype} or has an unusual header"
                )
            dtypes.add(array.tokens.dtype.str)
            key = array.key if KEY.fullmatch(array.key) else f"{len(rows):09d}"
            rows.append((array.payload, len(array.tokens), 0, key.encode()))
        frames.append((compressed, len(data), len(arrays)))
        hashes.append(hash_frame(data))
    if len(dtypes) != 1:
        raise _needs_rewrite_error(path, f"it holds {' and '.join(sorted(dtypes)) or 'no samples'}")
    return write_shard_index(path, frames, rows, hashes), dtypes.pop()


def write_shard_index(
    path: Path,
    frames: list[tuple[int, int, int]],
    rows: list[Any],
    hashes: list[int],
    image_columns: Sequence[str] = (),
    *,
    files_only: bool = False,
) -> CorpusShard:
    """Write the index of a foreign shard from one tuple per frame and per sample; return its entry in a manifest."""
    samples = np.array(rows, make_sample_dtype(max(len(row[3]) for row in rows), image_columns))
    index = ShardIndex(np.array(frames, FRAME_DTYPE), samples, np.array(hashes, "<u8"))
    return CorpusShard(
        file=path.name,
        bytes=get_regular_file_size(path),
        blake3=hash_file(path),
        samples=len(rows),
        tokens=int(samples["tokens"].sum(dtype=np.int64)),
        text_bytes=0,
        index=index.save(path.with_name(make_index_name(path))),
        foreign=True,
        files_only=files_only,
        frame_bytes=FRAME_BYTES if path.name.endswith(".tar") else DEFAULT_FRAME_BYTES,
    )


def _iter_frames(path: Path) -> Iterator["Frame"]:
    """Yield stored size, uncompressed bytes and samples of each frame of a shard of token ids."""
    if not path.name.endswith(".tar"):
        yield from _iter_zstd_frames(path)
        return
    for data, arrays in iter_raw_frames(path, iter_shard_samples(path)):
        yield len(data), data, arrays


Frame = tuple[int, bytes, list[TokenArray]]


class TarSample(Protocol):
    """A sample with the offsets of its first member and of its payload, in a tar or a frame."""

    @property
    def key(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def payload(self) -> int: ...
    def _replace(self, *, begin: int, payload: int) -> Any: ...


SampleT = TypeVar("SampleT", bound=TarSample)


def iter_raw_frames(path: Path, samples: Iterable[SampleT]) -> Iterator[tuple[bytes, list[SampleT]]]:
    """Cut a plain tar into frames of about `FRAME_BYTES`, or one sample; yield each frame's bytes and samples.

    The frames cover every byte of the tar. The samples' offsets count from the start of their frame.
    """
    begin, frame_samples, size = 0, list[SampleT](), get_regular_file_size(path)
    with open_regular_file(path) as file:
        for sample in samples:
            if frame_samples and sample.begin - begin >= FRAME_BYTES:
                yield _read_raw_frame(file, path, begin, sample.begin, frame_samples)
                begin, frame_samples = sample.begin, []
            frame_samples.append(sample)
        if frame_samples:
            yield _read_raw_frame(file, path, begin, size, frame_samples)


def _read_raw_frame(
    file: IO[bytes], path: Path, begin: int, end: int, frame_samples: list[SampleT]
) -> tuple[bytes, list[SampleT]]:
    if end - begin > MAX_FRAME_BYTES:
        raise _needs_rewrite_error(
            path,
            f"sample {frame_samples[-1].key!r}, its files and other members after it take over {MAX_FRAME_BYTES} bytes",
        )
    file.seek(begin)
    data = file.read(end - begin)
    return data, [
        sample._replace(begin=sample.begin - begin, payload=sample.payload - begin) for sample in frame_samples
    ]


def _iter_zstd_frames(path: Path) -> Iterator[Frame]:
    """Yield the frames of a `.tar.zst`. Raises a UsageError unless each holds whole samples."""
    frame, data = 0, b""
    with open_regular_file(path) as file:
        for compressed, data in _split_zstd_frames(file, path):
            if not data.strip(b"\0"):
                raise _needs_rewrite_error(path, f"frame {frame} is empty")
            if frame == 0 and compressed == get_regular_file_size(path) and len(data) > 8 * FRAME_BYTES:
                raise _needs_rewrite_error(
                    path, "it is one zstd frame, in which nothing can be found without reading all"
                )
            try:
                arrays = list(iter_tar_samples(io.BytesIO(data), path, require_end_marker=False))
            except (UsageError, RefusedMemberError):
                raise
            except MegatfmError as error:
                raise _needs_rewrite_error(path, f"frame {frame} is no tar by itself ({error})") from error
            if not arrays:
                raise _needs_rewrite_error(path, f"frame {frame} holds no sample")
            yield compressed, data, arrays
            frame += 1
    if data[-tarfile.BLOCKSIZE :].strip(b"\0"):
        raise MegatfmError(f"{path}: is cut off: no mark of a tar's end")


def _split_zstd_frames(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield compressed size and uncompressed bytes of each zstd frame of a file."""
    compressed = b""
    while compressed or (compressed := file.read(CHUNK_BYTES)):
        decompressor = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
        chunks, size, n_compressed = list[bytes](), 0, 0
        try:
            while not decompressor.eof:
                if not compressed and not (compressed := file.read(CHUNK_BYTES)):
                    raise MegatfmError(f"{path}: damaged: its last zstd frame is cut off")
                chunks.append(decompressor.decompress(compressed[:CHUNK_BYTES]))
                n_compressed += len(compressed[:CHUNK_BYTES])
                compressed, size = compressed[CHUNK_BYTES:], size + len(chunks[-1])
                if size > MAX_FRAME_BYTES:
                    raise _needs_rewrite_error(path, f"a zstd frame unpacks to over {MAX_FRAME_BYTES} bytes")
        except zstandard.ZstdError as error:
            raise MegatfmError(f"{path}: damaged, or no zstd: {error}") from error
        compressed = decompressor.unused_data + compressed
        yield n_compressed - len(decompressor.unused_data), b"".join(chunks)


def _rewrite(paths: list[Path], tokenizer_hash: str, out: Path) -> Manifest:
    max_token = 0
    # First, since an id that doesn't fit would be found only at its shard.
    for path in log_progress(paths, "read", "file"):
        for array in iter_shard_samples(path):
            max_token = max(max_token, int(array.tokens.max(initial=0)))
    dtype: TokenDtype = "uint16" if max_token < 2**16 else "uint32"
    n_samples = 0
    with ShardWriter(out, tokenizer_hash=tokenizer_hash, token_dtype=dtype) as writer:
        for path in log_progress(paths, "copied", "file"):
            for array in _check_unique_keys(iter_shard_samples(path), set(), path):
                writer.add(f"{n_samples:09d}", array.tokens, f"{path.name}/{array.key}", 0)
                n_samples += 1
        return writer.finish({"indexed": "megatfm data index", "from": [path.name for path in paths]})


def _check_unique_keys(arrays: Iterable[TokenArray], keys: set[str], path: Path) -> Iterator[TokenArray]:
    """Yield the samples, and add their keys to `keys`. Raises a MegatfmError for a duplicate key."""
    for array in arrays:
        if array.key in keys:
            raise MegatfmError(f"{path}: sample {array.key!r} is there twice: refused")
        keys.add(array.key)
        yield array


def _needs_rewrite_error(path: Path, reason: str) -> UsageError:
    folder = path if path.is_dir() else path.parent
    return UsageError(f"{path}: {reason}: write it again with `megatfm data index {folder} --to FOLDER`")


def hash_file(path: Path) -> str:
    """Return the BLAKE3 hash of a file."""
    with open_regular_file(path) as file:
        return hash_content(file)
