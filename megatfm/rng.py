"""Random numbers as a pure function of a key, independent of state, rank and order of drawing.

They are built on the raw stream of Philox, a counter-based generator, because NumPy's compatibility policy fixes that
stream, but not the distributions derived from it. A resume or another layout must reproduce the same numbers.
"""

import hashlib
import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

KeyPart = int | str


class ChunkKey(NamedTuple):
    """Key for all random draws of a document's chunk in an epoch."""

    seed: int
    epoch: int
    sample: int
    """Index of the document in its corpus."""
    chunk: int
    """Index of the chunk in its document."""

    @property
    def without_epoch(self) -> NDArray[np.uint64]:
        """`chunk_keys` of the chunk [1], which are the same in every epoch."""
        return chunk_keys(self.seed, np.array([self.sample]), np.array([self.chunk]))


class _FixedState(ISeedSequence):
    """Gives a generator 128 bits as they are. With `Philox(key=…)` NumPy also asks the system for entropy, which it
    then doesn't use, and a generator takes three times as long."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._state, "<u8")


def bit_generator(*key: KeyPart) -> np.random.Philox:
    """Return the Philox bit generator of a key, e.g. `bit_generator(seed, "order", epoch)`."""
    plain = tuple([part if isinstance(part, str) else operator.index(part) for part in key])
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=16).digest()
    seed: Any = _FixedState(digest)  # NumPy's annotations know its own class alone
    return np.random.Philox(seed)


def random_uint64(n: int, *key: KeyPart) -> NDArray[np.uint64]:
    """Return `n` uniform 64-bit integers [n] of a key."""
    return np.asarray(bit_generator(*key).random_raw(n), dtype=np.uint64)


def uniform(n: int, *key: KeyPart) -> NDArray[np.float64]:
    """Return `n` uniform numbers [n] in [0, 1) of a key."""
    return to_unit_interval(random_uint64(n, *key))


def to_unit_interval(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Convert uniform 64-bit integers to uniform numbers in [0, 1), by their upper 53 bits."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, *key: KeyPart) -> NDArray[np.int64]:
    """Return a uniform random permutation [n] of 0 … n-1 of a key."""
    return np.argsort(random_uint64(n, *key), kind="stable").astype(np.int64)


MAX_RANKED = 2**16
"""Largest number of elements of which `sample` draws a number for each."""


def sample(count: int, n: int, *key: KeyPart) -> list[int]:
    """Return `count` distinct numbers of 0 … n-1 of a key, in random order. The cost is bounded, however large n is.

    Up to MAX_RANKED, these are the first of `permutation(n, *key)`; beyond, numbers drawn until `count` are distinct.
    """
    if not 0 <= count <= n:
        raise ValueError(f"{count} of {n} numbers")
    if count == 0:
        return []
    if n <= MAX_RANKED:
        numbers = random_uint64(n, *key)
        smallest = np.flatnonzero(numbers <= np.partition(numbers, count - 1)[count - 1])
        order: list[int] = smallest[np.argsort(numbers[smallest], kind="stable")].tolist()
        return order[:count]
    generator, drawn_numbers = bit_generator(*key), dict[int, None]()
    while len(drawn_numbers) < count:
        drawn = np.asarray(generator.random_raw(count - len(drawn_numbers)), dtype=np.uint64)
        drawn_numbers |= dict.fromkeys((drawn % np.uint64(n)).tolist())  # a bias of n / 2^64
    return list(drawn_numbers)


def hash_rows(key: tuple[KeyPart, ...], *columns: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a uniform 64-bit integer for each row of integer `columns` [n]; scalars are broadcast.

    Faster than one generator per key. For each column, adds its mixed values to the hash, then mixes the sum. Mixing
    is SplitMix64's finaliser (Steele, Lea & Flood 2014, figure 16; Stafford's variant 13), a bijection.
    """
    hashed = np.full(max((np.size(column) for column in columns), default=1), _hash_key(*key), np.uint64)
    for column in columns:
        hashed = _mix(hashed + _mix(np.atleast_1d(np.asarray(column)).astype(np.uint64) + _GOLDEN))
    return hashed


def chunk_keys(seed: int, samples: NDArray[Any], chunks: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a key for each chunk [n], the same in all epochs, with which packing is planned."""
    return hash_rows((seed, "pieces"), samples, chunks)


def row_keys(seed: int, positions: NDArray[Any]) -> NDArray[np.int64]:
    """Return a key ≥ 0 for each global row position [n], from which dropout and sampling are drawn."""
    return (hash_rows((seed, "row"), positions) >> np.uint64(1)).astype(np.int64)


def short_row_keys(seed: int, positions: NDArray[Any], parts: NDArray[Any]) -> NDArray[np.int64]:
    """Return a key ≥ 0 for each short row [n]: part `parts` of the full row at global position `positions`."""
    return (hash_rows((seed, "part of a row"), positions, parts) >> np.uint64(1)).astype(np.int64)


@lru_cache(maxsize=64, typed=True)
def _hash_key(*key: KeyPart) -> int:
    return int(random_uint64(1, *key)[0])


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment; without it, _mix would map 0 to 0


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
