"""The cache holds what was used last, within its bytes."""

from megatfm.data.cache import ByteCache


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    made = []

    def get(key: str) -> bytes:
        def make() -> bytes:
            made.append(key)
            return bytes(10)

        return cache.get(key, make)

    cache: ByteCache[str, bytes] = ByteCache(limit=30, size=len)
    for key in "abcad":  # d pushes b out, since a was used again
        assert len(get(key)) == 10
    for key in "acdb":
        get(key)
    assert made == ["a", "b", "c", "d", "b"]


def test_a_value_over_the_limit_is_kept_until_the_next() -> None:
    cache: ByteCache[int, bytes] = ByteCache(limit=5, size=len)
    one = cache.get(1, lambda: bytes(10))
    assert cache.get(1, lambda: bytes(11)) is one
    cache.get(2, lambda: bytes(10))
    assert len(cache.get(1, lambda: bytes(12))) == 12
