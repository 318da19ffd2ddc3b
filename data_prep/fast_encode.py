"""Encode texts faster than the tokenizer's own library does, to the same ids.

Byte-level BPE goes through gigatoken. SentencePiece BPE is encoded word by word: between two characters that stand
side by side in no piece, none is ever made, so a text may be cut there without changing an id. Cutting, counting and
joining are done for a whole batch at once, by NumPy and Arrow; only words that were not seen before reach
SentencePiece. Everything else, and every text that spells a reserved token, goes through the tokenizer itself; so does
a part of every batch, to be compared.
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
"""Words in memory, after which it begins anew; about 300 MB."""
LONGEST = 64
"""Bytes of a word that is remembered, at most."""
WORDS_PER_TEXT = 64
"""New words in a text for SentencePiece: few texts cost calls, long ones time, which grows faster than they do."""
_CHUNK = 2**15  # of bytes, so that all arrays of one stay in the cache
_NUL = "\0"

IdArrays = list[NDArray[np.int32]]


class CachedWordEncoder:
    """The ids of texts, as `tokenizer.encode_batch` gives them."""

    unusual = ()

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = [
            tokenizer.id_to_piece(token).replace(SPACE_MARK, " ") for token in range(tokenizer.vocab_size)
        ]
        self._cut_table = _cuts(pieces)
        # Between words that are encoded together stands a NUL, if that is one id whatever stands beside it.
        nul = tokenizer.encode_batch([_NUL], 1)[0]
        self._nul = int(nul[0]) if len(nul) == 1 and not any(_NUL in piece for piece in pieces) else None
        self._mark = tokenizer.encode_batch([SPACE_MARK], 1)[0]
        self._known: dict[bytes, bytes] = {}

    def __call__(self, texts: Sequence[str], threads: int) -> IdArrays:
        return encode_between_metaspaces(texts, lambda parts: self._encode(parts, threads), self._mark)

    def _encode(self, texts: Sequence[str], threads: int) -> IdArrays:
        data, begins, first_words = self._cut([text.encode() for text in texts])
        if not len(begins):
            return [np.empty(0, np.int32) for _ in texts]
        offsets = pyarrow.py_buffer(np.append(begins, len(data)).astype("<i8"))
        buffers = [None, offsets, pyarrow.py_buffer(data)]
        words = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(begins), buffers).dictionary_encode()
        ids_by_word = self._lookup(words.dictionary.to_pylist(), threads)
        _, ends, ids = pyarrow.array(ids_by_word, pyarrow.large_binary()).take(words.indices).buffers()
        result = np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)
        return np.split(result, np.frombuffer(ends, np.int64)[first_words[1:]] // 4)

    def _cut(self, texts: Sequence[bytes]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
        """All texts in one, where words begin in it, and the number of each text's first word."""
        data = b"".join(texts)
        values = np.frombuffer(data, np.uint8)
        is_begin = np.empty(len(values), np.bool_)
        is_begin[:1] = True
        for at in range(1, len(values), _CHUNK):
            characters = values[at - 1 : at + _CHUNK].astype(np.intp)
            np.take(
                self._cut_table.ravel(),
                characters[:-1] << 8 | characters[1:],
                out=is_begin[at : at + _CHUNK],
                mode="clip",
            )
        places = np.cumsum([0, *map(len, texts)])[:-1]
        is_begin[places[places < len(data)]] = True
        begins = np.flatnonzero(is_begin)
        return data, begins, np.searchsorted(begins, places)

    def _lookup(self, words: list[bytes], threads: int) -> list[bytes]:
        """The ids of each of these words, as the bytes of int32."""
        ids_of_word = self._known
        if len(ids_of_word) > MAX_CACHED_WORDS:
            ids_of_word.clear()
        new = [word for word in words if word not in ids_of_word]
        ids_of_word.update(zip(new, self._encode_words(new, threads), strict=True))
        ids_by_word = [ids_of_word[word] for word in words]
        for word in new:
            if len(word) > LONGEST:
                del ids_of_word[word]
        return ids_by_word

    def _encode_words(self, words: list[bytes], threads: int) -> list[bytes]:
        texts = [word.decode() for word in words]
        if self._nul is None or any(_NUL in text for text in texts):
            return [ids.tobytes() for ids in self._tokenizer.encode_batch(texts, threads)]
        groups = [texts[at : at + WORDS_PER_TEXT] for at in range(0, len(texts), WORDS_PER_TEXT)]
        result: list[bytes] = []
        for ids in self._tokenizer.encode_batch([_NUL.join(group) for group in groups], threads):
            data, begin = ids.tobytes(), 0
            for end in (*(np.flatnonzero(ids == self._nul) * 4).tolist(), len(data)):
                result.append(data[begin:end])
                begin = end + 4
        return result


def _cuts(pieces: Sequence[str]) -> NDArray[np.bool_]:
    """[256, 256]: whether text may be cut between two bytes of its UTF-8."""
    may = np.ones((256, 256), np.bool_)
    may[:, 0x80:0xC0] = False  # inside a character
    for piece in pieces:
        values = np.frombuffer(piece.encode(), np.uint8)
        may[values[:-1], values[1:]] = False
    return may


MOST_CHECKED = 2**15
"""Characters of a text that is compared, at most."""


class FastEncoder:
    """`encode_batch` of a tokenizer whose files lie in a folder."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._fast: _Gigatoken | CachedWordEncoder | None = None
        if (
            isinstance(tokenizer, HuggingFaceTokenizer)
            and tokenizer.kind == "byte-bpe"
            and tokenizer.lossless
        ):
            self._fast = _gigatoken((folder / TOKENIZER_FILENAMES[1]).read_bytes())
        elif (
            isinstance(tokenizer, SentencePieceTokenizer)
            and tokenizer.kind == "sentencepiece"
            and tokenizer.lossless
        ):
            self._fast = CachedWordEncoder(tokenizer)

    def encode_batch(self, texts: Sequence[str], threads: int) -> IdArrays:
        """The ids of each text."""
        if self._fast is None:
            return self._tokenizer.encode_batch(texts, threads)
        usual = [not any(character in text for character in self._fast.unusual) for text in texts]
        fast = iter(
            self._fast([text for text, is_usual in zip(texts, usual, strict=True) if is_usual], threads)
        )
        unusual_texts = [text for text, is_usual in zip(texts, usual, strict=True) if not is_usual]
        slow = iter(self._tokenizer.encode_batch(unusual_texts, threads) if unusual_texts else [])
        result = [next(fast) if is_usual else next(slow) for is_usual in usual]
        self._check(texts, usual, result)
        return result

    def _check(self, texts: Sequence[str], usual: Sequence[bool], result: IdArrays) -> None:
        """Compare one text of the batch, of middling length if there is one; a huge one would take too long."""
        lengths = {number: len(texts[number]) for number, is_usual in enumerate(usual) if is_usual}
        short = [number for number, length in lengths.items() if length <= MOST_CHECKED]
        if not short:
            return
        number = min(short, key=lambda index: abs(lengths[index] - MOST_CHECKED // 8))
        (expected,) = self._tokenizer.encode_batch([texts[number]], 1)
        if not np.array_equal(expected, result[number]):
            name, way_out = (
                ("gigatoken", "uninstall it, or report this text")
                if isinstance(self._fast, _Gigatoken)
                else ("the memory of words", "report this text")
            )
            raise MegatfmError(
                f"{name} gave other ids than the tokenizer: {way_out}: {texts[number][:200]!r}"
            )


class _Gigatoken:
    """Byte-level BPE by gigatoken."""

    def __init__(self, encoder: Any, unusual: Sequence[str]) -> None:
        self._encoder = encoder
        self.unusual = unusual
        self._awkward = import_module("awkward")  # what it gives back; it takes as long as 20 MB of text

    def __call__(self, texts: Sequence[str], threads: int) -> IdArrays:
        if not texts:
            return []
        rows = self._encoder.encode_batch(list(texts), parallel=threads > 1)
        flat = np.asarray(self._awkward.flatten(rows)).astype(np.int32)
        return np.split(flat, np.cumsum(np.asarray(self._awkward.num(rows)))[:-1])


def _gigatoken(tokenizer_json: bytes) -> _Gigatoken | None:
    """An encoder without the added tokens, as texts that spell one are kept from it; None without the library."""
    try:
        import gigatoken
    except ModuleNotFoundError:
        return None
    values = json.loads(tokenizer_json)
    # Special ones are no more than text to our tokenizers; the others are found in it before all else.
    added = [token["content"] for token in values["added_tokens"] if not token["special"]]
    values["added_tokens"] = []
    encoder = gigatoken.Tokenizer.from_json(json.dumps(values).encode())
    return _Gigatoken(encoder, added)
