"""Indexes that all processes of a machine map, as good as the corpus's own, and the cache of what was used last."""

import gc
import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from megatfm.corpus import index_cache
from megatfm.corpus.byte_cache import ByteCache
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.index_cache import Indexes, SharedIndexes
from megatfm.corpus.storage import ShardCacheConfig, make_room
from tests.support.documentation import load_script
from tests.support.files import flip_bit

Write = Callable[..., Path]
FORK = multiprocessing.get_context("fork")
memory: Any = load_script("packing")


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "SHARED_FROM_SAMPLES", 1)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCacheConfig:
    return ShardCacheConfig(tmp_path / "cache", 10**6)


def files(cache: ShardCacheConfig) -> list[Path]:
    return sorted(path for path in (cache.folder / "indexes").iterdir() if not path.name.endswith(".lock"))


def assert_right(corpus: Corpus, documents: list[np.ndarray]) -> None:
    assert corpus.lengths().tolist() == [len(tokens) for tokens in documents]
    for block in range(corpus.n_blocks):
        for number, tokens in corpus.read_block(block):
            assert tokens.tolist() == documents[number].tolist()


def in_a_process(work: Callable[..., object], *arguments: Any) -> Any:
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


@pytest.mark.parametrize(
    "options", [{}, {"pack": True}, {"compress": False}, {"compress": False, "pack": True, "token_dtype": "uint32"}]
)
def test_shared_ones_say_what_the_corpus_has(
    options: dict[str, Any], write: Write, make_documents: Any, cache: ShardCacheConfig
) -> None:
    documents = make_documents(90)
    folder = write(documents, **options)
    corpus, alone = Corpus.open(folder, cache), Corpus.open(folder)
    assert isinstance(corpus.indexes, SharedIndexes)
    assert not isinstance(alone.indexes, SharedIndexes)
    assert len(files(cache)) == 1
    assert_right(corpus, documents)
    assert_right(pickle.loads(pickle.dumps(corpus)), documents)
    assert corpus.blocks.tolist() == alone.blocks.tolist()
    for shared, separate in zip(corpus.indexes, alone.indexes, strict=True):
        assert shared.frames.tolist() == separate.frames.tolist()
        assert shared.samples.tolist() == separate.samples.tolist()
        assert shared.has_packed_frames == separate.has_packed_frames
        assert (shared.frame_hashes is None) == (separate.frame_hashes is None)
    with pytest.raises(ValueError, match="read-only"):
        corpus.blocks[0] = 1


def test_small_corpora_write_nothing(folder: Path, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "SHARED_FROM_SAMPLES", 101)
    assert type(Corpus.open(folder, cache).indexes) is Indexes
    assert not cache.folder.exists()


def test_ranks_at_once_write_one_file(
    folder: Path, make_documents: Any, cache: ShardCacheConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, write_tables = FORK.Barrier(5), SharedIndexes._write

    def note(self: SharedIndexes, path: Path, key: str) -> None:
        (tmp_path / f"written by {os.getpid()}").touch()
        write_tables(self, path, key)

    def rank() -> None:
        start.wait()
        assert_right(Corpus.open(folder, cache), make_documents(100))

    monkeypatch.setattr(SharedIndexes, "_write", note)
    ranks = [in_a_process(rank) for _ in range(5)]
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 5
    assert len(list(tmp_path.glob("written by *"))) == 1
    assert len(files(cache)) == 1


def test_a_process_that_dies_while_writing_leaves_the_index_to_the_next(
    folder: Path, make_documents: Any, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(descriptor: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", die)
        dying = in_a_process(Corpus.open, folder, cache)
        dying.join()
    assert dying.exitcode == -signal.SIGKILL
    assert [path.suffix for path in files(cache)] == [".partial"]
    corpus = Corpus.open(folder, cache)
    assert isinstance(corpus.indexes, SharedIndexes)
    assert_right(corpus, make_documents(100))
    assert [path.suffix for path in files(cache)] == [""]


def truncate(path: Path, other_content: bytes) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, other_content: bytes) -> None:
    flip_bit(path, 5000)


def empty(path: Path, other_content: bytes) -> None:
    path.write_bytes(b"")


def swap(path: Path, other_content: bytes) -> None:
    path.write_bytes(other_content)


def fifo(path: Path, other_content: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, other_content: bytes) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


@pytest.mark.parametrize("lie", [truncate, flip, empty, swap, fifo, link])
def test_a_wrong_index_file_is_written_again(
    lie: Callable[[Path, bytes], None], folder: Path, write: Write, make_documents: Any, cache: ShardCacheConfig
) -> None:
    Corpus.open(write(make_documents(100, seed=1), "other"), cache)
    (other_path,) = files(cache)
    Corpus.open(folder, cache)
    (path,) = set(files(cache)) - {other_path}
    right = path.read_bytes()
    lie(path, other_path.read_bytes())
    assert_right(Corpus.open(folder, cache), make_documents(100))
    assert path.read_bytes() == right
    assert path.is_file()
    assert not path.is_symlink()


def full_disk(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4200, limit[1]))


def no_room(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*system[:4], 0, *system[5:]]))


def no_folder(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.folder.write_text("a file")


def no_locks(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


def no_home(cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> ShardCacheConfig:
    return cache._replace(folder=Path("~no-such-user/cache"))


@pytest.mark.parametrize("trouble", [full_disk, no_room, no_folder, no_locks, no_home])
def test_without_a_place_each_process_has_its_own(
    trouble: Callable[..., ShardCacheConfig | None],
    folder: Path,
    make_documents: Any,
    cache: ShardCacheConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    place = trouble(cache, monkeypatch) or cache
    try:
        corpus = Corpus.open(folder, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert type(corpus.indexes) is Indexes
    assert_right(corpus, make_documents(100))
    assert "are not shared" in caplog.text
    assert "data.cache_dir" in caplog.text
    assert not cache.folder.is_dir() or not files(cache)


def test_room_is_not_made_of_what_others_map(folder: Path, make_documents: Any, cache: ShardCacheConfig) -> None:
    """Two jobs on a machine: what one maps stays while another needs room, and until the first has ended, killed."""
    opened, end = FORK.Event(), FORK.Event()

    def other_job() -> None:
        corpus = Corpus.open(folder, cache)
        assert isinstance(corpus.indexes, SharedIndexes)
        opened.set()
        end.wait()

    job = in_a_process(other_job)
    opened.wait()
    (path,) = files(cache)
    (cache.folder / "a corpus").mkdir()
    shard = cache.folder / "a corpus" / "shard"
    shard.write_bytes(b"x")
    make_room(cache, cache.limit)
    assert path.exists()
    assert not shard.exists()
    job.kill()
    job.join()
    make_room(cache, cache.limit)
    assert not path.exists()


def test_a_deleted_file_stays_for_those_who_map_it(folder: Path, make_documents: Any, cache: ShardCacheConfig) -> None:
    corpus = Corpus.open(folder, cache)
    (path,) = files(cache)
    path.unlink()
    assert_right(corpus, make_documents(100))
    assert_right(pickle.loads(pickle.dumps(corpus)), make_documents(100))
    assert path.exists()
    del corpus
    gc.collect()


def resident(path: Path) -> int:
    """Return the bytes of a file that this process has mapped in."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    actual = 0
    for line in lines:
        if line.endswith(str(path)):
            actual += next(int(entry.split()[1]) * 1024 for entry in lines if entry.startswith("Rss:"))
    return actual


def test_processes_release_files_read(tmp_path: Path, cache: ShardCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty shards of 80 KB of spans, of which 256 KB may stay."""
    monkeypatch.setattr(memory, "SHARD_DOCUMENTS", 10_000)
    monkeypatch.setattr(index_cache, "MAPPED_BYTES", 2**18)
    (tmp_path / "large").mkdir()
    memory.write_corpus(tmp_path / "large", 400_000)
    corpus = Corpus.open(tmp_path / "large", cache._replace(limit=10**7))
    lengths = corpus.lengths()
    (path,) = files(cache)
    assert lengths.sum() == corpus.n_tokens
    assert path.stat().st_size > 3.2e6
    # The blocks' arrays, and around a page that is read the system maps up to 15 others.
    assert resident(path) < 2**18 + 2**17 + 28 * corpus.n_blocks + 4096
    assert (corpus.lengths() == lengths).all()


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    result = []

    def get(key: str) -> bytes:
        def make() -> bytes:
            result.append(key)
            return bytes(10)

        return cache.get(key, make)

    cache: ByteCache[str, bytes] = ByteCache(limit=30, size_of=len)
    for key in "abcad":  # d pushes b out, since a was used again
        assert len(get(key)) == 10
    for key in "acdb":
        get(key)
    assert result == ["a", "b", "c", "d", "b"]


def test_a_value_over_the_limit_is_kept_until_the_next() -> None:
    cache: ByteCache[int, bytes] = ByteCache(limit=5, size_of=len)
    cached = cache.get(1, lambda: bytes(10))
    assert cache.get(1, lambda: bytes(11)) is cached
    cache.get(2, lambda: bytes(10))
    assert len(cache.get(1, lambda: bytes(12))) == 12


def test_threads_make_different_values_together_and_the_same_one_once() -> None:
    cache: ByteCache[int, bytes] = ByteCache(limit=100, size_of=len)
    both, result = Barrier(2, timeout=120), []

    def make(key: int) -> bytes:
        result.append(key)
        both.wait()  # fails if one waits for the other
        return bytes(10)

    with ThreadPoolExecutor(6) as pool:
        actual = list(pool.map(lambda key: cache.get(key, lambda: make(key)), [1, 2, 1, 2, 1, 2]))
    assert sorted(result) == [1, 2]
    assert actual[0] is actual[2] is actual[4]


def test_an_evicted_entry_is_made_again_and_frees_its_bytes() -> None:
    cache: ByteCache[str, bytes] = ByteCache(limit=20, size_of=len)
    first, second = cache.get("a", lambda: bytes(10)), cache.get("b", lambda: bytes(10))
    cache.evict("a")
    cache.evict("a")
    cache.get("c", lambda: bytes(10))
    assert cache.get("b", lambda: b"") is second, "it still has room"
    assert cache.get("a", lambda: bytes(10)) is not first
