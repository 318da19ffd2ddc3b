"""Random numbers that are a pure function of a key: no state, no rank, no order of drawing.

Philox is counter-based and its raw stream is frozen by NumPy's compatibility policy; the derived
distributions are not, so whatever a resume or another layout must reproduce is built on the raw stream.
"""

import hashlib
import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KeyPart = int | str


class PieceKey(NamedTuple):
    """Key of a piece of a document in an epoch, from which everything for that piece is drawn."""

    seed: int
    epoch: int
    sample: int
    """Number of the document in its corpus."""
    piece: int
    """Number of the piece in its document."""

    @property
    def without_epoch(self) -> NDArray[np.uint64]:
        """The piece's `piece_keys` [1], the same in every epoch."""
        return piece_keys(self.seed, np.array([self.sample]), np.array([self.piece]))


def bit_generator(*key: KeyPart) -> np.random.Philox:
    """The Philox bit generator of a key, e.g. `bit_generator(seed, "order", epoch)`."""
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def random_uint64(n: int, *key: KeyPart) -> NDArray[np.uint64]:
    """`n` uniform 64-bit integers [n] of a key."""
    return np.asarray(bit_generator(*key).random_raw(n), dtype=np.uint64)


def uniform(n: int, *key: KeyPart) -> NDArray[np.float64]:
    """`n` uniform numbers [n] in [0, 1) of a key, from the upper 53 bits."""
    return to_unit_interval(random_uint64(n, *key))


def to_unit_interval(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from uniform 64-bit integers, by their upper 53 bits."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, *key: KeyPart) -> NDArray[np.int64]:
    """A uniform permutation [n] of 0 … n-1 of a key."""
    return np.argsort(random_uint64(n, *key), kind="stable").astype(np.int64)


def hash_rows(key: tuple[KeyPart, ...], *columns: NDArray[Any]) -> NDArray[np.uint64]:
    """One uniform 64-bit integer for each row of integer `columns` [n] (a scalar is broadcast).

    For many keys at once, where a generator for each would be slow: SplitMix64's finaliser (Steele, Lea & Flood
    2014, figure 16, Stafford's variant 13), which is a bijection, applied to the hash so far plus the next column.
    """
    hashed = np.full(max((np.size(column) for column in columns), default=1), _first(*key), np.uint64)
    for column in columns:
        hashed = _mixed(hashed + _mixed(np.atleast_1d(np.asarray(column)).astype(np.uint64) + _GOLDEN))
    return hashed


def piece_keys(seed: int, samples: NDArray[Any], pieces: NDArray[Any]) -> NDArray[np.uint64]:
    """A key for each piece [n] that is the same in all epochs: what the packing is planned with."""
    return hash_rows((seed, "pieces"), samples, pieces)


def row_keys(seed: int, positions: NDArray[Any]) -> NDArray[np.int64]:
    """A key ≥ 0 for each global position [n] of the order of rows: what dropout and sampling are drawn from."""
    return (hash_rows((seed, "row"), positions) >> np.uint64(1)).astype(np.int64)


def short_row_keys(seed: int, positions: NDArray[Any], parts: NDArray[Any]) -> NDArray[np.int64]:
    """A key ≥ 0 for each of the shorter rows [n] into which the rows at these positions are cut."""
    return (hash_rows((seed, "part of a row"), positions, parts) >> np.uint64(1)).astype(np.int64)


@lru_cache(maxsize=64, typed=True)
def _first(*key: KeyPart) -> int:
    return int(random_uint64(1, *key)[0])


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # so that 0 is no fixed point


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
