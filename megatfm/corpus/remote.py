"""Remote folders through fsspec: list, download that resumes, verified upload."""

import base64
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from blake3 import blake3

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import hash_content

ATTEMPTS = 10
"""Attempts of an operation that makes no progress, which take about four minutes."""
MAX_WAIT_SECONDS = 60.0
"""Longest wait between two attempts, before jitter."""
CHUNK_BYTES = 2**20
PART_BYTES = 50 * 2**20
"""Bytes in a part of a large upload to S3."""

# Names that file systems have for the version of a file, the most reliable first.
_VERSION_FIELDS = ("ETag", "etag", "md5Hash", "blob_id", "content_md5", "Content-MD5", "checksum", "crc32c")
_TIME_FIELDS = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
# On these, an upload appears under its name only when it is complete. Elsewhere it has a temporary name first.
_ATOMIC_UPLOAD_PROTOCOLS = frozenset(("s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "adl", "oss", "memory"))
_WEB = frozenset(("http", "https"))
# Statuses of HTTP that pass: request timeout, too early, too many requests.
_TRANSIENT = (408, 425, 429)
_PROGRAMMING_ERRORS = (TypeError, AttributeError, LookupError, AssertionError)
"""Errors of code, not of a network, so that another attempt won't help."""
# Independent of the module-level generator, which a user may have seeded alike on all ranks.
_JITTER = random.SystemRandom()

log = logging.getLogger("megatfm")


@dataclass(frozen=True)
class RemoteFile:
    """A file below a URL: its name relative to the URL, its bytes, and its version."""

    name: str
    size: int
    version: str
    path: str = field(compare=False, default="")
    """Path in the file system of fsspec, or "" if unknown."""


class DiskError(Exception):
    """This machine's disk failed, not the network."""

    def __init__(self, cause: OSError) -> None:
        self.cause = cause


@dataclass(frozen=True)
class RemoteFolder:
    """A folder or file behind a URL. Methods raise a MegatfmError, or a UsageError where another attempt won't help."""

    url: str

    def list_files(self) -> list[RemoteFile]:
        """Return all files below the URL, also in subfolders, sorted by name; for a file's URL, just that file."""

        def list_files(fs: Any, root: str) -> list[RemoteFile]:
            fs.invalidate_cache()
            listing = _list_html_index(fs, root) if _get_protocols(fs) & _WEB else fs.find(root, detail=True)
            prefix = f"{root.rstrip('/')}/"
            names = {
                path: path.removeprefix(prefix) if path.startswith(prefix) else path.rpartition("/")[2]
                for path in listing
            }
            if _get_protocols(fs) & _WEB:
                names = {path: unquote(name) for path, name in names.items()}
            return [_to_remote_file(names[path], info, path) for path, info in listing.items() if names[path]]

        files: list[RemoteFile] = with_retries(self.url, "folder or file", list_files)
        return sorted(files, key=lambda file: file.name)

    def stat(self, name: str, path: str = "") -> RemoteFile | None:
        """Return the file of that name, or None. path: its path in the file system, if known."""

        def find_file(fs: Any, root: str) -> RemoteFile | None:
            fs.invalidate_cache()
            try:
                info = fs.info(path or f"{root}/{name}")
            except FileNotFoundError:
                return None
            return _to_remote_file(name, info) if info["type"] == "file" else None

        remote_file: RemoteFile | None = with_retries(self.url, name, find_file)
        return remote_file

    def read_head(self, file: RemoteFile, size: int) -> bytes:
        """Return the first `size` bytes of a file, or all of a shorter one."""

        def read(fs: Any, root: str) -> bytes:
            with fs.open(file.path or f"{root}/{file.name}", "rb") as source:
                return bytes(source.read(size))

        data: bytes = with_retries(self.url, file.name, read)
        return data

    def download(self, file: RemoteFile, path: Path) -> None:
        """Download a file to `path`, where it appears when it is complete.

        Bytes that an earlier attempt fetched, even in a killed process, are not fetched again. Raises a MegatfmError
        if the file has changed since it was listed.
        """
        version = blake3(f"{self.url}\0{file.name}\0{file.version}\0{file.size}".encode()).hexdigest(8)
        partial = path.with_name(f".{path.name}.{version}.partial")

        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            download_rest(self.url, file.name, partial, file.size, file.path)
        except DiskError as error:
            raise MegatfmError(f"can't write {path}: {error.cause.strerror}: make room, and run again") from error
        current = self.stat(file.name, file.path)
        if partial.stat().st_size != file.size or current is None or current.version != file.version:
            partial.unlink()
            raise MegatfmError(f"{self.url}: {file.name} changed while it was read: run the same command again")
        partial.replace(path)

    def upload(self, path: Path, name: str) -> RemoteFile:
        """Upload the local file `path`, in parts if it is large; return the stored file.

        It appears under `name` when it is complete. Then it is verified by the store's checksum, or read back if the
        store has none that can be compared.
        """

        def send(fs: Any, root: str) -> RemoteFile:
            final = f"{root}/{name}"
            options = {"chunksize": PART_BYTES} if _get_protocols(fs) & {"s3", "s3a"} else {}
            if _get_protocols(fs) & _ATOMIC_UPLOAD_PROTOCOLS:
                fs.put_file(str(path), final, **options)
            else:
                folder, _, base = final.rpartition("/")
                fs.makedirs(folder, exist_ok=True)
                fs.put_file(str(path), f"{folder}/.{base}.partial")
                fs.mv(f"{folder}/.{base}.partial", final)
            fs.invalidate_cache()
            info = fs.info(final)
            if info["size"] != path.stat().st_size or not (
                _has_same_checksum(info, path) or _has_same_content(fs, final, path)
            ):
                raise OSError(f"what arrived is not what was sent, {path.stat().st_size} bytes")
            return _to_remote_file(name, info)

        remote_file: RemoteFile = with_retries(self.url, name, send, verb="written")
        return remote_file

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

        def remove_file(fs: Any, root: str) -> None:
            fs.invalidate_cache()
            if fs.exists(f"{root}/{name}"):
                fs.rm_file(f"{root}/{name}")

        with_retries(self.url, name, remove_file, verb="removed")


def download_rest(url: str, name: str, partial: Path, size: int, path: str = "") -> None:
    """Append to `partial` the bytes that it lacks of a remote file of `size` bytes.

    path: the remote file's path in the file system, if known. Bytes that arrived before a network error or a kill are
    not fetched again. If the remote file is longer than `size`, so is `partial`. Raises DiskError, MegatfmError and
    UsageError.
    """

    def n_bytes() -> int:
        return partial.stat().st_size if partial.exists() else 0

    def copy(fs: Any, root: str) -> None:
        if n_bytes() < size or not size:
            _append_remote(fs, path or f"{root}/{name}", partial, size)

    with_retries(url, name, copy, n_bytes)


def with_retries(
    url: str,
    name: str,
    operation: Callable[[Any, str], Any],
    progress: Callable[[], int] = lambda: 0,
    verb: str = "read",
) -> Any:
    """Return `operation(file system, path)` for a URL.

    Network errors and unreachable stores are retried after 1 s, 2 s, 4 s and so on up to a minute. Each wait varies by
    a half, so that ranks don't retry together, and is logged. There are `ATTEMPTS` in all, counted anew whenever
    `progress` changes. Errors that waiting can't fix, such as a wrong URL or missing rights, are raised at once.
    name, verb: what is done to which file, for messages.
    """
    import fsspec  # by name, since it takes a while to import and most corpora are local

    if "::" in url:
        raise UsageError(f"{url}: chained URLs are not opened: give a plain one")
    attempt, last_progress = 0, progress()
    while True:
        try:
            fs, root = fsspec.core.url_to_fs(url)
            return operation(fs, root)
        except FileNotFoundError as error:
            raise UsageError(f"{url}: there is no {name}: check the URL") from error
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url}: can't be opened: {error}") from error
        except NotImplementedError as error:
            raise UsageError(f"{url}: {name} can't be {verb}: {url.partition('://')[0]}:// has no way") from error
        except (DiskError, MegatfmError):
            raise
        except Exception as error:  # every protocol has its own errors
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if _is_refusal(error):
                raise UsageError(
                    f"{url}: {name} can't be {verb} ({reason}): check the credentials, and what they may do there"
                ) from error
            attempt, last_progress = (1 if progress() != last_progress else attempt + 1), progress()
            if attempt == ATTEMPTS or isinstance(error, _PROGRAMMING_ERRORS):
                raise MegatfmError(f"{url}: {name} can't be {verb} ({reason})") from error
            seconds = min(2.0 ** (attempt - 1), MAX_WAIT_SECONDS) * _JITTER.uniform(0.5, 1.5)
            log.warning(f"{url}: {name} can't be {verb} ({reason}): try {attempt + 1} of {ATTEMPTS} in {seconds:.1f} s")
            time.sleep(seconds)


def _is_refusal(error: Exception) -> bool:
    """Return True if a server, or its client library, refuses a request that no retry would change."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in _TRANSIENT
    return is_refused or isinstance(error, PermissionError) or type(error).__name__.endswith("CredentialsError")


def _append_remote(fs: Any, remote_path: str, partial: Path, size: int) -> None:
    """Append to `partial` from where it ends, or fetch all anew if the server can't seek.

    A remote file shorter than `size` is read to its end. Raises an OSError if the connection ends before, and DiskError
    if `partial` can't be written.
    """
    with fs.open(remote_path, "rb", block_size=8 * CHUNK_BYTES) as source, _open_to_append(partial) as file:
        offset = file.tell()
        try:
            source.seek(offset)
        except (ValueError, OSError):
            offset = file.truncate(0)
        while offset <= size and (chunk := source.read(CHUNK_BYTES)):
            _write(file, chunk)
            offset += len(chunk)
    if offset < size and offset != fs.info(remote_path)["size"]:
        raise OSError(f"the connection ended at byte {offset} of {size}")


def _open_to_append(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab")
    except OSError as error:
        raise DiskError(error) from error


def _write(file: IO[bytes], chunk: bytes) -> None:
    try:
        file.write(chunk)
        file.flush()
    except OSError as error:
        raise DiskError(error) from error


def _list_html_index(fs: Any, root: str) -> dict[str, dict[str, Any]]:
    """Return the files that web pages below a URL link to, or the file at the URL.

    fsspec's own `find` would follow links that lead upwards.
    """
    if not str((first := fs.info(root)).get("mimetype") or "").startswith("text/html"):
        return {root: first}
    files, folders, visited = {}, [f"{root.rstrip('/')}/"], set()
    while folders:
        folder = folders.pop()
        for link in fs.ls(folder, detail=False):
            if link in visited or "?" in link or not link.startswith(folder) or link == folder:
                continue
            visited.add(link)
            if link.endswith("/"):
                folders.append(link)
            else:
                files[link] = fs.info(link)
    return files


def _get_protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _to_remote_file(name: str, info: dict[str, Any], path: str = "") -> RemoteFile:
    if info.get("size") is None:
        raise MegatfmError(f"{path or name}: the server doesn't say how long it is, so nothing can be checked")
    versions = (str(info[key]) for key in (*_VERSION_FIELDS, *_TIME_FIELDS) if info.get(key))
    return RemoteFile(name, int(info["size"]), next(versions, ""), path)


def _has_same_checksum(info: dict[str, Any], path: Path) -> bool:
    """Return True if the store's checksum (ETag, md5Hash) equals the file's MD5.

    False doesn't prove a difference, since an ETag of S3 is no MD5 with SSE-KMS.
    """
    tag = str(info.get("ETag") or "").strip('"')
    if len(tag) == 32:
        return tag == _hash_md5(path).hex()
    if "-" in tag:
        parts = b"".join(hashlib.md5(part).digest() for part in _iter_parts(path))
        return tag == f"{hashlib.md5(parts).hexdigest()}-{len(parts) // 16}"
    expected = info.get("md5Hash")
    return bool(expected) and expected == base64.b64encode(_hash_md5(path)).decode()


def _hash_md5(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").digest()


def _iter_parts(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def _has_same_content(fs: Any, remote_path: str, path: Path) -> bool:
    """Return True if the bytes of a remote file equal those of the local file `path`."""
    with fs.open(remote_path, "rb") as remote, open(path, "rb") as local:
        return hash_content(remote) == hash_content(local)
