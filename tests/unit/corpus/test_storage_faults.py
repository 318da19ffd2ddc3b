"""Corpora behind URLs when the store is away, the cache is damaged, or another corpus lies there by now."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatfm.corpus import remote
from megatfm.corpus import storage as module
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.errors import MegatfmError, UsageError
from tests.support.packed_corpora import SHARD, assert_refused, have_same_documents


def failing_first(
    monkeypatch: pytest.MonkeyPatch, times: int, error: Exception | None = None
) -> tuple[list[int], list[float]]:
    """Have the first `times` accesses fail; the number of accesses and the seconds waited between them."""
    accesses, waits, real = [0], list[float](), fsspec.core.url_to_fs

    def access(url: str) -> Any:
        accesses[0] += 1
        if accesses[0] <= times:
            raise error or ConnectionResetError("the network is down")
        return real(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", access)
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    return accesses, waits


def test_a_store_that_is_away_is_waited_for_some_minutes(
    memory: str,
    cache: ShardCacheConfig,
    fetched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = Corpus.open(memory, cache)
    accesses, waits = failing_first(monkeypatch, remote.ATTEMPTS - 1)
    corpus.read_block(0)
    expected = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert accesses == [len(expected) + 1]
    assert all(n / 2 <= waited <= 1.5 * n for n, waited in zip(expected, waits, strict=True))
    assert sum(expected) > 240
    assert caplog.messages[1].startswith(f"{memory}: shard-000000.tar.zst can't be read (ConnectionResetError: the")
    assert "try 3 of 10 in " in caplog.messages[1]
    _, remaining = failing_first(monkeypatch, 3)
    corpus.read_block(corpus.shard_blocks(2)[0])
    assert not set(waits) & set(remaining), "ranks don't ask together"
    failing_first(monkeypatch, 99)
    bad = corpus.shard_blocks(1)[0]
    reason = f"{memory}: {SHARD} can't be read (ConnectionResetError: the network"
    assert_refused(lambda: corpus.read_block(bad), reason)


class Status(Exception):
    """Errors as HTTP libraries raise them: `status` is aiohttp's, `code` Google's."""

    def __init__(self, **status: int) -> None:
        super().__init__("said the server")
        vars(self).update(status)


class NoCredentialsError(Exception):
    """Stand-in for botocore's error of that name."""


@pytest.mark.parametrize(("error", "accesses"), [
    (PermissionError("Access Denied"), 1),
    (NoCredentialsError("Unable to locate credentials"), 1),
    (Status(status=403), 1),
    (Status(code=401), 1),
    (TypeError("a mistake"), 1),
    (Status(status=429), 3),
    (Status(code=503), 3),
    (TimeoutError(), 3),
], ids=str)  # fmt: skip
def test_permanent_errors_of_storage_are_not_retried(
    memory: str, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch, error: Exception, accesses: int
) -> None:
    counted, waits = failing_first(monkeypatch, 2, error)
    if accesses == 3:
        Corpus.open(memory, cache)
    else:
        kind = MegatfmError if isinstance(error, TypeError) else UsageError
        assert_refused(lambda: Corpus.open(memory, cache), "manifest.json can't be read", str(error), kind=kind)
    assert counted[0] >= accesses
    assert len(waits) == accesses - 1


def test_a_file_system_without_locks_is_named(
    memory: str, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    assert_refused(lambda: Corpus.open(memory, cache), "can't lock files (No locks available)", "data.cache_dir")


def test_a_corpus_replaced_behind_its_url_is_read_anew(
    memory: str, folder: Path, write: Callable[..., Path], cache: ShardCacheConfig, fetched: list[str]
) -> None:
    """Same names and sizes, but other tokens, other frames; and one that comes back. Files that an older version kept
    are not read."""
    first = Corpus.open(memory, cache)
    assert have_same_documents(first, Corpus.open(folder))
    for known in (file for shard in first.manifest.shards for file in (shard, shard.index)):
        # Under the plain name, as versions before 2026-11 kept files.
        (first.folder / known.file).write_bytes(first.store.path(known).read_bytes())
    texts = [tokens.copy() for number in range(first.n_blocks) for _, tokens in first.read_block(number)]
    remaining = write(texts, "others", frame_bytes=3000)
    swapped = write([tokens[::-1].copy() for tokens in texts], "swapped", compress=False)
    plain = write(texts, "plain", compress=False)
    sizes = [[shard.bytes for shard in Corpus.open(folder).manifest.shards] for folder in (swapped, plain)]
    assert sizes[0] == sizes[1]
    fs = fsspec.filesystem("memory")
    for new in (remaining, plain, swapped, folder):
        for path in new.iterdir():
            fs.pipe(f"/bucket/corpus/{path.name}", path.read_bytes())
        assert have_same_documents(Corpus.open(memory, cache), Corpus.open(new))
    assert fetched.count("shard-000000.index.zst") == 4, "and what is there already is not fetched again"


def test_a_damaged_cached_file_is_an_error_with_a_remedy(memory: str, cache: ShardCacheConfig) -> None:
    corpus = Corpus.open(memory, cache)
    path = corpus.store.path(corpus.manifest.shards[0].index)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert_refused(lambda: Corpus.open(memory, cache), str(path), "delete this file of the cache", memory)
    path.unlink()
    assert Corpus.open(memory, cache).n_samples == 100
