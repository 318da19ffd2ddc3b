"""The cache holds what was used last, within its bytes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from megatfm.corpus.byte_cache import ByteCache


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
    one = cache.get(1, lambda: bytes(10))
    assert cache.get(1, lambda: bytes(11)) is one
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


def test_what_is_forgotten_is_made_again_and_frees_its_bytes() -> None:
    cache: ByteCache[str, bytes] = ByteCache(limit=20, size_of=len)
    one, two = cache.get("a", lambda: bytes(10)), cache.get("b", lambda: bytes(10))
    cache.evict("a")
    cache.evict("a")
    cache.get("c", lambda: bytes(10))
    assert cache.get("b", lambda: b"") is two, "it still has room"
    assert cache.get("a", lambda: bytes(10)) is not one
