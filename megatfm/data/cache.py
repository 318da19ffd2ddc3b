"""A cache that forgets what was not used for longest when it grows over a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Keeps values of at most `limit` bytes together, but always the last one. Thread-safe.

    Pickled, it is empty on the other side, so that worker processes start with caches of their own.
    """

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self._limit = limit
        self._size = size
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ByteCache, (self._limit, self._size)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of `key`, made if it is not here."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            value = self._values[key] = make()
            self._bytes += self._size(value)
            while self._bytes > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._bytes -= self._size(oldest)
            return value


def nbytes(value: Any) -> int:
    """The size of an array, or of a tuple of arrays."""
    return sum(map(nbytes, value)) if isinstance(value, tuple) else int(value.nbytes)
