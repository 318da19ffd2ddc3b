"""Encode texts to the same ids as the tokenizer's library, but faster.

Byte-level BPE uses gigatoken. SentencePiece BPE is encoded word by word, with a cache: two characters that are
neighbours in no piece of the vocabulary are never in one piece, so a text may be cut between them without changing an
id. NumPy and Arrow cut, count and join a batch at once; only new words reach SentencePiece. All other tokenizers, and
texts that spell an added token, use the tokenizer itself. One text of every batch is encoded both ways and compared.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from megatfm.errors import MegatfmError
from megatfm.tokenizers import TOKENIZER_FILENAMES, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatfm.tokenizers.base import SPACE_MARK
from megatfm.tokenizers.sentence_piece import encode_between_metaspaces

MAX_CACHED_WORDS = 2**21
"""Words in the cache, about 300 MB, above which it is emptied."""
MAX_CACHED_BYTES = 64
"""Bytes of the longest word in the cache."""
WORDS_PER_TEXT = 64
"""New words that are joined to one text: SentencePiece is slow on long texts, but each call has a cost, too."""
_CHUNK = 2**15  # bytes, so that all arrays of a chunk stay in the CPU cache
_NUL = "\0"

IdArrays = list[NDArray[np.int32]]


class CachedWordEncoder:
    """Encodes texts as `tokenizer.encode_batch` does, with a cache of words."""

    added_tokens = ()

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.id_to_piece(token).replace(SPACE_MARK, " ") for token in range(tokenizer.vocab_size)]
        self._boundaries = _make_boundary_table(pieces)
        # Words are joined by NUL, if NUL is one id whatever its neighbours.
        nul = tokenizer.encode_batch([_NUL], 1)[0]
        self._nul = int(nul[0]) if len(nul) == 1 and not any(_NUL in piece for piece in pieces) else None
        self._mark = tokenizer.encode_batch([SPACE_MARK], 1)[0]
        self._cache: dict[bytes, bytes] = {}

    def __call__(self, texts: Sequence[str], threads: int) -> IdArrays:
        return encode_between_metaspaces(texts, lambda parts: self._encode(parts, threads), self._mark)

    def _encode(self, texts: Sequence[str], threads: int) -> IdArrays:
        data, word_starts, first_words = self._cut([text.encode() for text in texts])
        if not len(word_starts):
            return [np.empty(0, np.int32) for _ in texts]
        words = _make_binary_array(data, np.append(word_starts, len(data))).dictionary_encode()
        ids_by_word = self._look_up_words(words.dictionary.to_pylist(), threads)
        id_table = _make_binary_array(b"".join(ids_by_word), np.cumsum([0, *map(len, ids_by_word)]))
        _, ends, ids = id_table.take(words.indices).buffers()
        result = np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)
        return np.split(result, np.frombuffer(ends, np.int64)[first_words[1:]] // 4)

    def _cut(self, texts: Sequence[bytes]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated texts, the start of each word in them, and the index of each text's first word."""
        data = b"".join(texts)
        values = np.frombuffer(data, np.uint8)
        is_word_start = np.empty(len(values), np.bool_)
        is_word_start[:1] = True
        for start in range(1, len(values), _CHUNK):
            characters = values[start - 1 : start + _CHUNK].astype(np.intp)
            np.take(
                self._boundaries.ravel(),
                characters[:-1] << 8 | characters[1:],
                out=is_word_start[start : start + _CHUNK],
                mode="clip",
            )
        text_starts = np.cumsum([0, *map(len, texts)])[:-1]
        is_word_start[text_starts[text_starts < len(data)]] = True
        word_starts = np.flatnonzero(is_word_start)
        return data, word_starts, np.searchsorted(word_starts, text_starts)

    def _look_up_words(self, words: list[bytes], threads: int) -> list[bytes]:
        """Return the ids of each word, as the bytes of int32."""
        ids_of_word = self._cache
        if len(ids_of_word) > MAX_CACHED_WORDS:
            ids_of_word.clear()
        new_words = [word for word in words if word not in ids_of_word]
        ids_of_word.update(zip(new_words, self._encode_words(new_words, threads), strict=True))
        ids_by_word = [ids_of_word[word] for word in words]
        for word in new_words:
            if len(word) > MAX_CACHED_BYTES:
                del ids_of_word[word]
        return ids_by_word

    def _encode_words(self, words: list[bytes], threads: int) -> list[bytes]:
        texts = [word.decode() for word in words]
        if self._nul is None or any(_NUL in text for text in texts):
            return [ids.tobytes() for ids in self._tokenizer.encode_batch(texts, threads)]
        groups = [texts[start : start + WORDS_PER_TEXT] for start in range(0, len(texts), WORDS_PER_TEXT)]
        result: list[bytes] = []
        for ids in self._tokenizer.encode_batch([_NUL.join(group) for group in groups], threads):
            data, begin = ids.tobytes(), 0
            for end in (*(np.flatnonzero(ids == self._nul) * 4).tolist(), len(data)):
                result.append(data[begin:end])
                begin = end + 4
        return result


def _make_binary_array(data: bytes, bounds: NDArray[np.int64]) -> pyarrow.Array:
    """Return the values that lie between bounds of `data`. `pyarrow.array` of a list would import pandas."""
    buffers = [None, pyarrow.py_buffer(bounds.astype("<i8")), pyarrow.py_buffer(data)]
    return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(bounds) - 1, buffers)


def _make_boundary_table(pieces: Sequence[str]) -> NDArray[np.bool_]:
    """Return [256, 256]: whether a text may be cut between two neighbouring bytes of UTF-8."""
    may_cut = np.ones((256, 256), np.bool_)
    may_cut[:, 0x80:0xC0] = False  # inside a character
    for piece in pieces:
        values = np.frombuffer(piece.encode(), np.uint8)
        may_cut[values[:-1], values[1:]] = False
    return may_cut


MAX_CHECKED_CHARACTERS = 2**15
"""Characters of the longest text that is compared."""


class FastEncoder:
    """A fast `encode_batch` of a tokenizer. folder: with the tokenizer's files."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._fast: _Gigatoken | CachedWordEncoder | None = None
        if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.kind == "byte-bpe" and tokenizer.lossless:
            self._fast = _make_gigatoken_encoder((folder / TOKENIZER_FILENAMES[1]).read_bytes())
        elif isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.kind == "sentencepiece" and tokenizer.lossless:
            self._fast = CachedWordEncoder(tokenizer)

    def encode_batch(self, texts: Sequence[str], threads: int) -> IdArrays:
        """Return the ids [n] of each text. Raises MegatfmError if the fast ids differ from the tokenizer's."""
        if self._fast is None:
            return self._tokenizer.encode_batch(texts, threads)
        is_fast = [not any(token in text for token in self._fast.added_tokens) for text in texts]
        fast_texts = [text for text, fast in zip(texts, is_fast, strict=True) if fast]
        slow_texts = [text for text, fast in zip(texts, is_fast, strict=True) if not fast]
        fast_ids = iter(self._fast(fast_texts, threads))
        slow_ids = iter(self._tokenizer.encode_batch(slow_texts, threads) if slow_texts else [])
        result = [next(fast_ids) if fast else next(slow_ids) for fast in is_fast]
        self._check(texts, is_fast, result)
        return result

    def _check(self, texts: Sequence[str], is_fast: Sequence[bool], result: IdArrays) -> None:
        """Compare one text of the batch, of medium length if there is one. Huge texts would take too long."""
        lengths = {index: len(texts[index]) for index, fast in enumerate(is_fast) if fast}
        short = [index for index, length in lengths.items() if length <= MAX_CHECKED_CHARACTERS]
        if not short:
            return
        index = min(short, key=lambda index: abs(lengths[index] - MAX_CHECKED_CHARACTERS // 8))
        (expected,) = self._tokenizer.encode_batch([texts[index]], 1)
        if not np.array_equal(expected, result[index]):
            name, remedy = (
                ("gigatoken", "uninstall it, or report this text")
                if isinstance(self._fast, _Gigatoken)
                else ("the cache of words", "report this text")
            )
            raise MegatfmError(f"{name} gave other ids than the tokenizer: {remedy}: {texts[index][:200]!r}")


class _Gigatoken:
    """Byte-level BPE by gigatoken."""

    def __init__(self, encoder: Any, added_tokens: Sequence[str]) -> None:
        self._encoder = encoder
        self.added_tokens = added_tokens
        self._awkward = import_module("awkward")  # has the type of its results

    def __call__(self, texts: Sequence[str], threads: int) -> IdArrays:
        if not texts:
            return []
        rows = self._encoder.encode_batch(list(texts), parallel=threads > 1)
        flat = np.asarray(self._awkward.flatten(rows)).astype(np.int32)
        return np.split(flat, np.cumsum(np.asarray(self._awkward.num(rows)))[:-1])


def _make_gigatoken_encoder(tokenizer_json: bytes) -> _Gigatoken | None:
    """Return an encoder without the added tokens; None without the library. It gets no text that spells one."""
    try:
        import gigatoken
    except ModuleNotFoundError:
        return None
    values = json.loads(tokenizer_json)
    # Our tokenizers treat special tokens in a text as text; the other added tokens are found first.
    added = [token["content"] for token in values["added_tokens"] if not token["special"]]
    values["added_tokens"] = []
    encoder = gigatoken.Tokenizer.from_json(json.dumps(values).encode())
    return _Gigatoken(encoder, added)
