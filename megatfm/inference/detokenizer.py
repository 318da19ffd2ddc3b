"""Text of ids that arrive one after the other."""

import codecs
from collections.abc import Iterable

from megatfm.tokenizers import Tokenizer

_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """Decodes ids that arrive one after the other. The bytes of a character are held back until it is whole.

    prompt_ids: the ids of a prompt that they continue, and which is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        spelled = tokenizer.token_bytes()
        self._stream = (
            ContextDetokenizer(tokenizer, prompt_ids)
            if spelled is None
            else ByteDetokenizer(tokenizer, spelled)
        )

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that is certain now. Bytes that are no UTF-8 become U+FFFD, and reserved ids nothing."""
        return "".join(self._stream.add(int(token)) for token in ids)

    def end(self) -> str:
        """Return what was held back: U+FFFD where a character is cut off, else nothing."""
        return self._stream.end()


class ByteDetokenizer:
    """Detokenizer of tokenizers whose ids stand for the same bytes wherever they stand."""

    def __init__(self, tokenizer: Tokenizer, spelled: list[bytes]) -> None:
        self._spelled = spelled
        if tokenizer.unk is not None:
            spelled[tokenizer.unk] = tokenizer.decode([tokenizer.unk]).encode()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        return self._decoder.decode(self._spelled[token])

    def end(self) -> str:
        """Return the text that was held back."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """Detokenizer of all others, where the space before an id depends on what stands before it.

    What a new id adds is what `decode` gives more with it, decoded from the ids on that made the text before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = list(prompt_ids)  # the last ids that gave text
        self._pending: list[int] = []  # ids since then

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._emitted, self._pending = self._pending, []
        return text

    def end(self) -> str:
        """Return the text that was held back."""
        return self._new_text()

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        return decode([*self._emitted, *self._pending])[len(decode(self._emitted)) :]
