"""Hashes of words and of n-grams of words, of many texts at once, by numpy; and MinHash signatures (Broder 1997).

A word is a run of letters and digits with their marks (vowel signs, accents), in lower case, after NFKC (Unicode
Standard Annex 15) and without invisible characters: format characters, Arabic and Hebrew vowel points, the elongating
kashida. `_` separates words. In scripts without spaces, each Han character and each kana is a word; Thai, Lao, Khmer,
Burmese and related scripts are cut where a hash of the two neighbouring characters says so, at every fourth place on
average, which is about the length of words in these languages.

A word's hash is that of its UTF-8 bytes, eight at a time; an n-gram's hash combines those of its words in their order.
All are 64 bits wide. The minima of a signature are rensa's.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from megatfm.data_prep.documents import Document, batch_by_bytes

Hashes = NDArray[np.uint64]

# Letters and digits in lower case, and spaces in place of all else. Other bytes belong to words: `_encode` has removed
# the punctuation of other scripts before.
_SPACE = ord(" ")
_WORDS = bytes(
    byte if byte >= 128 else ord(chr(byte).lower()) if chr(byte).isalnum() else _SPACE for byte in range(256)
)
# Kinds of characters.
_SEPARATES, _IN_WORD, _IS_WORD, _IN_LONG, _UNSEEN = range(5)
# Blocks of scripts without spaces (Unicode 15): those of which a character is a word, and those of which several are.
# fmt: off
_SINGLE = (
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3038, 0x30FF), (0x3105, 0x312F), (0x31A0, 0x31BF),
    (0x31F0, 0x31FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x1B000, 0x1B16F), (0x20000, 0x323AF),
)  # Han, kana, bopomofo
_LONG = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF), (0xA9E0, 0xA9FF),
    (0xAA60, 0xAADF),
)  # Thai, Lao, Burmese, Khmer, Tai
# Points and signs that Arabic and Hebrew are mostly written without, kashida, fillers, joiners, selectors.
_POINTS = (
    (0x0591, 0x05C7), (0x0610, 0x061A), (0x0640, 0x0640), (0x064B, 0x065F), (0x0670, 0x0670), (0x06D6, 0x06ED),
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF),
)
# fmt: on
_PLANES = ((0, 0x323B0), (0xE0000, 0xE0200))
"""Ranges of code points outside of which all are private or unassigned."""
_FIRST, _SECOND, _BASE = (np.uint64(n) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
_27, _30, _31 = (np.uint64(n) for n in (27, 30, 31))
# Masks for the eight bytes at a place, of which 0 … 8 belong to the word (little-endian).
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def hash_words(texts: Sequence[str]) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the hashes of all words of all texts in order, and the first hash of each text: [texts + 1]."""
    encoded = [_encode(text) for text in texts]
    # Eight bytes of space after the end, as a word's last eight bytes may be read beyond it.
    joined = b" ".join([*encoded, b" " * 8]).translate(_WORDS)
    is_word = np.frombuffer(joined, np.uint8) != _SPACE
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    if is_word[0]:
        edges = np.concatenate([[0], edges])
    begins, ends = edges[::2], edges[1::2]
    text_starts = np.cumsum([0, *(len(text_bytes) + 1 for text_bytes in encoded)])
    return _hash(joined, begins, ends - begins), np.searchsorted(begins, text_starts)


def hash_ngrams(words: Hashes, offsets: NDArray[np.int64], length: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the hashes of all n-grams of `length` words in each text, and the first n-gram of each text [texts + 1].

    A text of fewer words, but at least one, has one n-gram: all of its words.
    """
    combined = np.zeros(max(0, len(words) - length + 1), np.uint64)
    for index in range(length if len(combined) else 0):
        combined *= _BASE
        combined += words[index : index + len(combined)]
    combined = splitmix64(combined)
    counts = np.diff(offsets)
    n_ngrams = np.where(counts >= length, counts - length + 1, (counts > 0).astype(np.int64))
    starts = np.concatenate([[0], np.cumsum(n_ngrams)])
    result = np.empty(starts[-1], np.uint64)
    is_full = np.repeat(counts >= length, n_ngrams)
    index_in_text = np.arange(starts[-1]) - np.repeat(starts[:-1], n_ngrams)
    source = np.repeat(offsets[:-1], n_ngrams) + index_in_text
    result[is_full] = combined[source[is_full]]
    for text in np.flatnonzero((counts < length) & (counts > 0)):
        result[starts[text]] = hash_ngram(words[offsets[text] : offsets[text + 1]])
    return result, starts


def hash_ngram(words: Hashes) -> np.uint64:
    """Return the hash of all words as one n-gram."""
    combined = np.zeros(1, np.uint64)
    for word in words:
        combined = combined * _BASE + word
    return np.uint64(splitmix64(combined)[0])


def splitmix64(values: Hashes) -> Hashes:
    """Return mixed values, in which every bit depends on all (finalizer of SplitMix64, Steele et al. 2014)."""
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
    result = splitmix64(result)
    words = np.flatnonzero(lengths > 8)
    offsets, remaining = begins[words] + 8, lengths[words] - 8
    while len(words):
        result[words] = splitmix64(result[words] ^ (eights[offsets] & _MASKS[np.minimum(remaining, 8)]))
        is_longer = remaining > 8
        offsets, remaining, words = offsets[is_longer] + 8, remaining[is_longer] - 8, words[is_longer]
    return result


def _encode(text: str) -> bytes:
    """Encode a text as UTF-8 in lower case; beyond ASCII as its words alone, separated by spaces."""
    if text.isascii():
        return text.encode()
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    points = np.frombuffer(bytearray(text.encode("utf-32-le", "replace")), "<u4")
    kinds = _classify_code_points()[points]
    if (kinds == _UNSEEN).any():
        points, kinds = points[kinds != _UNSEEN], kinds[kinds != _UNSEEN]
    points = np.where(kinds == _SEPARATES, np.uint32(_SPACE), points)
    is_single = kinds == _IS_WORD
    is_cut = np.zeros(len(points), np.bool_)  # before a character
    is_cut[1:] = is_single[1:] | is_single[:-1]
    if (kinds == _IN_LONG).any():
        is_long = kinds == _IN_LONG
        pairs = splitmix64(points[:-1].astype(np.uint64) << np.uint64(32) | points[1:].astype(np.uint64))
        is_cut[1:] |= (is_long[1:] != is_long[:-1]) | (is_long[1:] & (pairs % np.uint64(4) == 0))
    if is_cut.any():
        points = np.insert(points, np.flatnonzero(is_cut), _SPACE)
    return points.astype("<u4").tobytes().decode("utf-32-le").encode()


@cache
def _classify_code_points() -> NDArray[np.uint8]:
    """Return the kind of every code point."""
    kinds = np.full(0x110000, _SEPARATES, np.uint8)
    for begin, end in _PLANES:
        for point in range(begin, end):
            character = chr(point)
            category = unicodedata.category(character)
            if category == "Cf":
                kinds[point] = _UNSEEN
            elif category[0] == "M" or character.isalnum():
                kinds[point] = _IN_WORD
    for blocks, kind in ((_SINGLE, _IS_WORD), (_LONG, _IN_LONG)):
        for first, last in blocks:
            span = kinds[first : last + 1]
            span[span == _IN_WORD] = kind
    for first, last in _POINTS:
        span = kinds[first : last + 1]
        span[span != _SEPARATES] = _UNSEEN
    return kinds


@cache
def make_word_character_table() -> NDArray[np.bool_]:
    """Return for every code point whether `\\w` matches it."""
    return np.array([chr(point).isalnum() or point == ord("_") for point in range(0x110000)], np.bool_)


BATCH_BYTES = 2**18  # so that all arrays of a batch stay in the cache

Signatures = NDArray[np.uint32]


def compute_signatures(texts: Sequence[str], n_grams: int, hashes: int, seed: int = 0) -> Signatures:
    """Return the MinHash signatures [texts, hashes] of the sets of each text's n-grams of words.

    The share of hashes in which two signatures agree estimates the Jaccard similarity of the sets. A text of fewer
    words has one n-gram, all of its words; a text without a word has one word, its characters.
    """
    words, offsets = hash_words(texts)
    if (np.diff(offsets) == 0).any():
        words, offsets = hash_words(
            [
                text if has_words else _spell_as_word(text)
                for text, has_words in zip(texts, np.diff(offsets), strict=True)
            ]
        )
    ngrams, starts = hash_ngrams(words, offsets, n_grams)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(ngrams, starts.astype(np.uint64), hashes, seed)
    return np.array(matrix.to_rows(), "<u4").reshape(len(texts), hashes)


def sign_documents(
    documents: Iterable[Document], n_grams: int, hashes: int
) -> Iterator[tuple[list[Document], Signatures]]:
    """Yield all documents with their signatures, in batches."""
    for batch in batch_by_bytes(documents, BATCH_BYTES):
        yield batch, compute_signatures([document.text for document in batch], n_grams, hashes)


def hash_bands(rows: NDArray[Any], band: int, width: int) -> Hashes:
    """Return one hash [signatures] of the `width` hashes of a band: equal if all of them are equal."""
    combined = np.full(len(rows), band, np.uint64)
    for column in range(band * width, (band + 1) * width):
        combined = splitmix64(combined ^ rows[:, column].astype(np.uint64))
    return combined


def _spell_as_word(text: str) -> str:
    """Return a word for a text without words: its code points, joined by `x`, which occurs in no real text."""
    return "x".join(["x", *(str(ord(character)) for character in text.strip())])
