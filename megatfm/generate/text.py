"""Ids to text while they are made, without ever showing half a character."""

import codecs
from collections.abc import Iterable

from megatfm.tokenizers import Tokenizer

_BROKEN = "\ufffd"


class TextStream:
    """Decodes ids that arrive one after the other. The bytes of a character are held back until it is whole.

    before: the ids of a prompt that they continue, and which is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        spelled = tokenizer.token_bytes()
        self._stream = _InContext(tokenizer, before) if spelled is None else _ByBytes(tokenizer, spelled)

    def add(self, ids: Iterable[int]) -> str:
        """The text that is certain now. Bytes that are no UTF-8 become U+FFFD, and reserved ids nothing."""
        return "".join(self._stream.add(int(token)) for token in ids)

    def end(self) -> str:
        """The rest: U+FFFD where a character is cut off, else nothing."""
        return self._stream.end()


class _ByBytes:
    """For tokenizers whose ids stand for the same bytes wherever they stand."""

    def __init__(self, tokenizer: Tokenizer, spelled: list[bytes]) -> None:
        self._spelled = spelled
        if tokenizer.unk is not None:
            spelled[tokenizer.unk] = tokenizer.decode([tokenizer.unk]).encode()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._spelled[token])

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _InContext:
    """For all others, where the space before an id depends on what stands before it.

    What a new id adds is what `decode` gives more with it, decoded from the ids on that made the text before.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(before)  # the last ids that gave text
        self._held: list[int] = []  # ids since then

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._more()
        if not text or text.endswith(_BROKEN):
            return ""
        self._shown, self._held = self._held, []
        return text

    def end(self) -> str:
        return self._more()

    def _more(self) -> str:
        decode = self._tokenizer.decode
        return decode([*self._shown, *self._held])[len(decode(self._shown)) :]
