"""Corpora behind URLs: fetched once for a machine, verified on arrival, bounded on disk, never half there."""

import functools
import http.server
import importlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np
import pytest

from megatfm.corpus import remote
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.data.loader import DataLoader
from megatfm.errors import MegatfmError, UsageError
from tests.support.packed_corpora import SHARD, assert_refused, have_same_documents, pack_dataset, serve_s3, use_s3
from tests.support.workers import start_fork_server


def count_cached_bytes(cache: ShardCacheConfig) -> int:
    return sum(path.stat().st_size for path in cache.folder.glob("*/[!.]*") if path.is_file())


def test_a_url_gives_what_the_folder_gives(
    memory: str, folder: Path, cache: ShardCacheConfig, fetched: list[str], causal: Any
) -> None:
    remote, local = Corpus.open(memory, cache), Corpus.open(folder)
    assert not [name for name in fetched if name.endswith(".tar.zst")], "shards come when they are read"
    assert remote.fingerprint == local.fingerprint
    assert have_same_documents(remote, local)
    assert len(fetched) == len(set(fetched)) == 2 * len(local.manifest.shards)
    assert have_same_documents(Corpus.open(memory, cache), local)
    assert len(fetched) == 2 * len(local.manifest.shards), "nothing is fetched twice"
    options: Any = {"sequence_length": 64, "seed": 1, "plan_cache_key": "x"}
    np.testing.assert_array_equal(
        pack_dataset(remote, causal, **options).read_row(5)["tokens"],
        pack_dataset(local, causal, **options).read_row(5)["tokens"],
    )


def test_reads_a_corpus_over_http(folder: Path, cache: ShardCacheConfig) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert have_same_documents(Corpus.open(url, cache), Corpus.open(folder))
        with pytest.raises(UsageError, match=r"there is no manifest\.json: check the URL"):
            Corpus.open(f"{url}/elsewhere", cache)
        server.shutdown()


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The corpus in a bucket of a server that speaks S3, and its URL."""
    with serve_s3() as endpoint:
        use_s3(endpoint, monkeypatch)
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("bucket")
        for path in folder.iterdir():
            fs.pipe(f"bucket/corpus/{path.name}", path.read_bytes())
        yield "s3://bucket/corpus"
        fs.clear_instance_cache()


def test_reads_a_corpus_over_s3(bucket: str, folder: Path, cache: ShardCacheConfig, fetched: list[str]) -> None:
    remote = Corpus.open(bucket, cache)
    assert have_same_documents(remote, Corpus.open(folder))
    assert len(fetched) == len(set(fetched)) == 2 * len(remote.manifest.shards)
    with pytest.raises(UsageError, match=r"there is no manifest\.json: check the URL"):
        Corpus.open("s3://bucket/elsewhere", cache)


class GcsHandler(http.server.BaseHTTPRequestHandler):
    """The part of Google's JSON API that reading takes: an object's metadata, a range of it, the list of objects."""

    folder: Path
    object_path = re.compile(r"(/download)?/storage/v1/b/bucket/o(?:/([^?]*))?(?:\?(.*))?")

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        match = self.object_path.fullmatch(self.path)
        assert match, self.path
        download, name = match[1], unquote(match[2] or "")
        path = self.folder / name.removeprefix("corpus/")
        actual = name.startswith("corpus/") and path.is_file()
        if not name:
            self.answer(200, b"{}")
        elif not actual:
            self.answer(404, b'{"error": {"code": 404, "message": "No such object"}}')
        elif download:
            data = path.read_bytes()
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            self.answer(206 if part else 200, data[int(part[1]) : int(part[2]) + 1] if part else data)
        else:
            facts = {"kind": "storage#object", "bucket": "bucket", "name": name}
            self.answer(200, json.dumps(facts | {"size": str(path.stat().st_size)}).encode())

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_reads_a_corpus_over_gcs(
    folder: Path, cache: ShardCacheConfig, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gcsfs, from a server of this file, since no fake server of GCS is small enough to be installed for it."""
    # Without asking Google what kind of bucket it is, over a protocol that the server does not speak.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    plain = importlib.import_module("gcsfs.core").GCSFileSystem
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", plain)
    handler = type("Handler", (GcsHandler,), {"folder": folder})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"token": "anon", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        monkeypatch.setitem(fsspec.config.conf, "gs", where)
        remote = Corpus.open("gs://bucket/corpus", cache)
        assert have_same_documents(remote, Corpus.open(folder))
        assert len(fetched) == len(set(fetched)) == 2 * len(remote.manifest.shards)
        with pytest.raises(UsageError, match=r"there is no manifest\.json: check the URL"):
            Corpus.open("gs://bucket/elsewhere", cache)
        server.shutdown()


def test_a_protocol_without_its_package_is_one_line(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
        with pytest.raises(UsageError, match=f"{protocol}://bucket/corpus: can't be opened: .*{package}") as caught:
            Corpus.open(f"{protocol}://bucket/corpus", cache)
        assert "\n" not in str(caught.value)


def test_the_cache_is_bounded_and_what_went_comes_again(
    memory: str, folder: Path, cache: ShardCacheConfig, fetched: list[str]
) -> None:
    local = Corpus.open(folder)
    sizes = [shard.bytes for shard in local.manifest.shards]
    limit = max(sizes) + sum(shard.index.bytes for shard in local.manifest.shards) + 10
    bounded = cache._replace(limit=limit)
    remote = Corpus.open(memory, bounded)
    assert have_same_documents(remote, local)
    assert have_same_documents(remote, local)
    assert count_cached_bytes(cache) <= limit
    shards = [name for name in fetched if name.endswith(".tar.zst")]
    assert len(shards) >= 2 * len(sizes)
    with pytest.raises(UsageError, match=r"more than data\.cache_bytes = 100: raise it"):
        Corpus.open(memory, cache._replace(limit=100))


@pytest.mark.parametrize("change", ["flipped", "longer", "shorter"])
def test_a_shard_that_arrives_damaged_is_never_cached(
    memory: str, cache: ShardCacheConfig, fetched: list[str], change: str
) -> None:
    fs, path = fsspec.filesystem("memory"), f"/bucket/corpus/{SHARD}"
    data = bytearray(fs.cat(path))
    data[100] ^= 1 if change == "flipped" else 0
    changed = {"flipped": data, "longer": data + b"x", "shorter": data[:-1]}[change]
    fs.pipe(path, bytes(changed))
    corpus = Corpus.open(memory, cache)
    bad = corpus.shard_blocks(1)[0]
    assert_refused(lambda: corpus.read_block(bad), f"{memory}/{SHARD}: its BLAKE3 hash is")
    assert not corpus.store.path(corpus.manifest.shards[1]).exists()
    assert not list(corpus.folder.glob("*.partial"))
    fs.pipe(path, bytes(data))
    if change != "flipped":
        corpus.read_block(bad)


def test_a_full_disk_is_one_line_and_leaves_nothing(
    memory: str, cache: ShardCacheConfig, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus.open(memory, cache)

    def full(file: Any, chunk: bytes) -> None:
        raise remote.DiskError(OSError(28, "No space left on device"))

    monkeypatch.setattr(remote, "_write", full)
    assert_refused(lambda: corpus.read_block(0), "No space left on device", "data.cache_dir")
    left = [path.name for path in corpus.folder.iterdir()]
    assert not [name for name in left if name.endswith((".tar.zst", ".partial"))]
    monkeypatch.undo()
    corpus.read_block(0)


def test_a_cache_that_cannot_be_written_is_no_trouble_of_the_network(
    memory: str, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt at the network would not help."""
    corpus = Corpus.open(memory, cache)
    partial = corpus.store.path(corpus.manifest.shards[0]).with_name("file") / "partial"
    partial.parent.write_text("no folder")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(remote.DiskError) as caught:
        remote.download_rest(memory, corpus.manifest.shards[0].file, partial, 100)
    assert isinstance(caught.value.cause, NotADirectoryError)


def test_an_interrupted_download_is_resumed(
    memory: str, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are written once; a file left by a kill is checked as a whole, and fetched again if it is damaged."""
    corpus = Corpus.open(memory, cache)
    entry = corpus.manifest.shards[1]
    data = fsspec.filesystem("memory").cat(f"/bucket/corpus/{SHARD}")
    path = corpus.store.path(entry)
    partial = path.with_name(f".{path.name}.partial")
    written, waits = [], []
    write = remote._write

    def failing(file: Any, chunk: bytes) -> None:
        """The connection ends after 100 bytes, twice."""
        if len(waits) < 2:
            write(file, chunk[:100])
            written.append(100)
            raise ConnectionError("reset by peer")
        write(file, chunk)
        written.append(len(chunk))

    monkeypatch.setattr(remote, "_write", failing)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    corpus.read_block(corpus.shard_blocks(1)[0])
    assert (path.read_bytes(), len(waits)) == (data, 2)
    assert written == [100, 100, len(data) - 200]
    for left, expected in ((data[:70], [len(data) - 70]), (b"x" * len(data), [len(data)])):
        path.unlink()
        partial.write_bytes(left)
        written.clear()
        corpus.read_block(corpus.shard_blocks(1)[0])
        assert (path.read_bytes(), written) == (data, expected)
        assert not partial.exists()


def read_all(url: str, cache: ShardCacheConfig, start: Any, out: Any) -> None:
    corpus = Corpus.open(url, cache)
    start.wait()
    out.put(sum(int(tokens.sum()) for number in range(corpus.n_blocks) for _, tokens in corpus.read_block(number)))


def test_ranks_fetch_a_file_once_and_a_killed_download_is_harmless(folder: Path, cache: ShardCacheConfig) -> None:
    """Processes over HTTP: three at once, and before them one that is killed within its first shard."""
    requested: list[str] = []
    slow = threading.Event()

    class Counting(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            requested.append(self.path)
            if not slow.is_set() and self.path.endswith(".tar.zst"):
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                self.wfile.write(bytes(1000))
                slow.wait(120)
                return
            time.sleep(0.1 if self.path.endswith(".tar.zst") else 0)  # so that all would ask for it
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counting, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        context = start_fork_server()
        out, alone, start = context.Queue(), context.Barrier(1), context.Barrier(3)
        victim = context.Process(target=read_all, args=(url, cache, alone, out))
        victim.start()
        for _ in range(12_000):
            if any(path.endswith(".tar.zst") for path in requested):
                break
            time.sleep(0.01)
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        assert any(path.endswith(".tar.zst") for path in requested), "it was killed within a download"
        slow.set()
        requested.clear()
        readers = [context.Process(target=read_all, args=(url, cache, start, out)) for _ in range(3)]
        for reader in readers:
            reader.start()
        sums = [out.get(timeout=120) for _ in readers]
        for reader in readers:
            reader.join()
        server.shutdown()
    local = Corpus.open(folder)
    expected = sum(int(t.sum()) for number in range(local.n_blocks) for _, t in local.read_block(number))
    assert sums == [expected] * 3
    shards = [path for path in requested if path.endswith(".tar.zst")]
    assert len(shards) == len(set(shards)) == len(local.manifest.shards)


@pytest.mark.parametrize(("url", "reason"), [
    ("pipe:cat /etc/passwd", "has no commands to run"),
    ("pipe://cat", "can't be opened: Protocol not known: pipe"),
    ("simplecache::memory://bucket/corpus", "chained URLs are not opened"),
    ("nothing://x", "can't be opened: Protocol not known"),
    ("memory://nowhere", "there is no manifest"),
])  # fmt: skip
def test_urls_that_are_no_place_of_a_corpus_are_refused(url: str, reason: str, cache: ShardCacheConfig) -> None:
    with pytest.raises(UsageError, match=reason):
        Corpus.open(url, cache)


def test_a_manifest_that_names_files_elsewhere_fetches_nothing(memory: str, cache: ShardCacheConfig) -> None:
    fs = fsspec.filesystem("memory")
    text = fs.cat("/bucket/corpus/manifest.json").decode().replace(SHARD, "../../secret.tar.zst")
    fs.pipe("/bucket/corpus/manifest.json", text.encode())
    with pytest.raises(MegatfmError, match=r"shards\.1\.file"):
        Corpus.open(memory, cache)
    assert not cache.folder.exists()


def test_workers_read_urls(memory: str, cache: ShardCacheConfig, causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.corpus.corpus.ShardCacheConfig", lambda: cache)
    assert check_corpus(memory).samples == 100
    rows = pack_dataset(Corpus.open(memory, cache), causal, sequence_length=64, seed=1)
    shutil.rmtree(cache.folder)  # even if all of it goes in between
    with DataLoader(rows, global_batch=8, micro_batch=8) as loader:
        next(loader)
