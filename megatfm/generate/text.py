"""Ids to text while they are made, without ever showing half a character."""

import codecs
import re
from collections.abc import Iterable

from megatfm.tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK, _UNKNOWN = "\u2581", "\ufffd"


class TextStream:
    """Decodes ids that arrive one after the other. The bytes of a character are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lengths = tokenizer.byte_lengths()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain now. Bytes that are no UTF-8 become U+FFFD, and reserved ids nothing."""
        return "".join(self._decoder.decode(self._bytes(int(token))) for token in ids)

    def end(self) -> str:
        """The rest: U+FFFD where a character is cut off, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        if token == self._tokenizer.unk:
            return _UNKNOWN.encode()
        if self._lengths[token] == 0:  # reserved
            return b""
        piece = self._tokenizer.piece(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode()
