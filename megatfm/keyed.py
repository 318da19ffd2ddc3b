"""Random numbers that are a pure function of a key: no state, no rank, no order of drawing.

Philox is counter-based and its raw stream is frozen by NumPy's compatibility policy; the derived
distributions are not, so whatever a resume or another layout must reproduce is built on the raw stream.
"""

import hashlib
import operator

import numpy as np
from numpy.typing import NDArray

Part = int | str


def bits(*key: Part) -> np.random.Philox:
    """The Philox bit generator of a key, e.g. `bits(seed, "order", epoch)`."""
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def raw(n: int, *key: Part) -> NDArray[np.uint64]:
    """`n` uniform 64-bit integers [n] of a key."""
    return np.asarray(bits(*key).random_raw(n), dtype=np.uint64)


def uniform(n: int, *key: Part) -> NDArray[np.float64]:
    """`n` uniform numbers [n] in [0, 1) of a key, from the upper 53 bits."""
    return (raw(n, *key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, *key: Part) -> NDArray[np.int64]:
    """A uniform permutation [n] of 0 … n-1 of a key."""
    return np.argsort(raw(n, *key), kind="stable").astype(np.int64)
