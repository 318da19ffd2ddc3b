"""Words as numbers: the hashes of all words, and of all runs of words, of many texts at once, by numpy.

A word is a run of letters, digits and `_` in lower case, as `\\w+` finds it. Its hash is that of its UTF-8 bytes,
eight at a time; a run's hash combines those of its words in their order. All are 64 bits wide.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Words in lower case, and space between them: what is left of other scripts, when their punctuation has become space,
# is words.
_SPACE = ord(" ")
_WORDS = bytes(
    byte if byte >= 128 else ord(chr(byte).lower()) if chr(byte).isalnum() or byte == ord("_") else _SPACE
    for byte in range(256)
)
_FIRST, _SECOND, _BASE = (np.uint64(n) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
_27, _30, _31 = (np.uint64(n) for n in (27, 30, 31))
# Of the eight bytes at a place, those of a word that has 0 … 8 bytes left (little-endian).
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of all words of all texts, in their order, and where each text's begin: [texts + 1]."""
    encoded = [_encode(text) for text in texts]
    # Eight bytes of space after the end, as a word's last eight bytes may be read beyond it.
    joined = b" ".join([*encoded, b" " * 8]).translate(_WORDS)
    is_word = np.frombuffer(joined, np.uint8) != _SPACE
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    if is_word[0]:
        edges = np.concatenate([[0], edges])
    begins, ends = edges[::2], edges[1::2]
    places = np.cumsum([0, *(len(each) + 1 for each in encoded)])
    return _hash(joined, begins, ends - begins), np.searchsorted(begins, places)


def run_hashes(words: Hashes, offsets: NDArray[np.int64], length: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of all runs of `length` words inside each text, and where each text's begin.

    A text of fewer words, but at least one, has one run: all of its words.
    """
    combined = np.zeros(max(0, len(words) - length + 1), np.uint64)
    for at in range(length if len(combined) else 0):
        combined *= _BASE
        combined += words[at : at + len(combined)]
    combined = mix(combined)
    counts = np.diff(offsets)
    runs = np.where(counts >= length, counts - length + 1, (counts > 0).astype(np.int64))
    begins = np.concatenate([[0], np.cumsum(runs)])
    result = np.empty(begins[-1], np.uint64)
    full = np.repeat(counts >= length, runs)
    inside = np.arange(begins[-1]) - np.repeat(begins[:-1], runs)
    source = np.repeat(offsets[:-1], runs) + inside
    result[full] = combined[source[full]]
    for text in np.flatnonzero((counts < length) & (counts > 0)):
        result[begins[text]] = one_run(words[offsets[text] : offsets[text + 1]])
    return result, begins


def one_run(words: Hashes) -> np.uint64:
    """The hash of all these words as one run."""
    combined = np.zeros(1, np.uint64)
    for word in words:
        combined = combined * _BASE + word
    return np.uint64(mix(combined)[0])


def mix(values: Hashes) -> Hashes:
    """Spread every bit over all (the finalizer of SplitMix64, Steele et al. 2014)."""
    values = values ^ (values >> _30)
    values *= _FIRST
    values ^= values >> _27
    values *= _SECOND
    values ^= values >> _31
    return values


def _hash(data: bytes, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> Hashes:
    eights = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))  # the eight bytes from each place on
    result = eights[begins] & _MASKS[np.minimum(lengths, 8)]
    result ^= lengths.astype(np.uint64) * _BASE
    result = mix(result)
    which = np.flatnonzero(lengths > 8)
    at, left = begins[which] + 8, lengths[which] - 8
    while len(which):
        result[which] = mix(result[which] ^ (eights[at] & _MASKS[np.minimum(left, 8)]))
        more = left > 8
        at, left, which = at[more] + 8, left[more] - 8, which[more]
    return result


def _encode(text: str) -> bytes:
    """UTF-8 in lower case, of other scripts the words alone; ASCII as it is."""
    if text.isascii():
        return text.encode()
    points = np.frombuffer(bytearray(text.lower().encode("utf-32-le")), "<u4")
    others = np.flatnonzero(points >= 128)
    points[others[~is_word()[points[others]]]] = _SPACE
    return points.tobytes().decode("utf-32-le").encode()


@cache
def is_word() -> NDArray[np.bool_]:
    """Of every code point, whether `\\w` matches it."""
    return np.array([chr(point).isalnum() or point == ord("_") for point in range(0x110000)], np.bool_)
