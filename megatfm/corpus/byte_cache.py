"""A cache with a limit in bytes that drops the least recently used entries."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """A least-recently-used cache of at most `limit` bytes; it always keeps the newest value. Thread-safe.

    size_of: returns the bytes of a value. on_drop: called with the key of each dropped value. Pickling drops the
    values, so worker processes start with an empty cache.
    """

    def __init__(
        self, limit: int, size_of: Callable[[Value], int], on_drop: Callable[[Key], None] | None = None
    ) -> None:
        self._limit = limit
        self._size = size_of
        self._on_drop = on_drop
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._loading: dict[Key, Lock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteCache, (self._limit, self._size, self._on_drop)

    def get(self, key: Key, load: Callable[[], Value]) -> Value:
        """Return the value of `key`, loading it on a miss. Threads that need the same key wait for one load."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            key_lock = self._loading.setdefault(key, Lock())
        with key_lock:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            value = load()
            with self._lock:
                self._loading.pop(key, None)
                self._drop(key)
                self._values[key] = value
                self._bytes += self._size(value)
                while self._bytes > self._limit and len(self._values) > 1:
                    self._drop(next(iter(self._values)))
            return value

    def __len__(self) -> int:
        return len(self._values)

    def evict(self, key: Key) -> None:
        """Drop the value of `key`, if cached."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        if key in self._values:
            self._bytes -= self._size(self._values.pop(key))
            if self._on_drop:
                self._on_drop(key)


def count_bytes(value: Any) -> int:
    """Return `value.nbytes`, or the sum over the values of nested tuples."""
    return sum(map(count_bytes, value)) if isinstance(value, tuple) else int(value.nbytes)
