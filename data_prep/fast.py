"""Ids faster than the tokenizer's own library makes them, and the same ones.

Byte-level BPE goes through gigatoken. SentencePiece BPE, whose pieces never reach from one word into the next, is
encoded word by word (see `word_memory`). Everything else, and every text that spells a reserved
token, goes through the tokenizer itself; so does a part of every batch, to be compared.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data_prep.word_memory import CachedWordEncoder
from megatfm.errors import MegatfmError
from megatfm.tokenizers import TOKENIZER_FILENAMES, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

MOST_CHECKED = 2**15
"""Characters of a text that is compared, at most."""

Ids = list[NDArray[np.int32]]


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

    def encode_batch(self, texts: Sequence[str], threads: int) -> Ids:
        """The ids of each text."""
        if self._fast is None:
            return self._tokenizer.encode_batch(texts, threads)
        usual = [not any(each in text for each in self._fast.unusual) for text in texts]
        fast = iter(
            self._fast([text for text, is_usual in zip(texts, usual, strict=True) if is_usual], threads)
        )
        others = [text for text, is_usual in zip(texts, usual, strict=True) if not is_usual]
        slow = iter(self._tokenizer.encode_batch(others, threads) if others else [])
        result = [next(fast) if is_usual else next(slow) for is_usual in usual]
        self._check(texts, usual, result)
        return result

    def _check(self, texts: Sequence[str], usual: Sequence[bool], result: Ids) -> None:
        """Compare one text of the batch, of middling length if there is one; a huge one would take too long."""
        lengths = {number: len(texts[number]) for number, is_usual in enumerate(usual) if is_usual}
        short = [number for number, length in lengths.items() if length <= MOST_CHECKED]
        if not short:
            return
        number = min(short, key=lambda each: abs(lengths[each] - MOST_CHECKED // 8))
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

    def __call__(self, texts: Sequence[str], threads: int) -> Ids:
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
