"""Incremental detokenization: text from ids that arrive one by one, up to an end token or a stop text."""

import codecs
from collections.abc import Iterable, Sequence

from megatfm.tokenizers import Tokenizer

_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """Decodes ids that arrive one by one. Bytes of an incomplete character are held back.

    prompt_ids: ids of the prompt, which precede the text and are not returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        token_bytes = tokenizer.token_bytes()
        self._stream = (
            ContextDetokenizer(tokenizer, prompt_ids)
            if token_bytes is None
            else ByteDetokenizer(tokenizer, token_bytes)
        )

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete. Bytes that are no UTF-8 become U+FFFD; reserved ids give none."""
        return "".join(self._stream.add(int(token)) for token in ids)

    def end(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, else nothing."""
        return self._stream.end()


class GrowingText:
    """A text that grows by tokens until one of `end_tokens`, or a stop text, ends it.

    prompt_ids: ids of the prompt, which precede the text and are not part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int], end_tokens: Iterable[int], stop: Sequence[str] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._end_tokens, self._stop = frozenset(end_tokens), stop
        self.text, self.is_done = "", False

    def add(self, token: int) -> str:
        """Append and return a token's text; nothing if the text is done."""
        if self.is_done:
            return ""
        new_text = self._detokenizer.add([token])
        self.text += new_text
        self.is_done = token in self._end_tokens or any(stop_text in self.text for stop_text in self._stop)
        return new_text

    def end(self) -> str:
        """Return the text up to the first stop text."""
        has_stop = any(stop_text in self.text for stop_text in self._stop)
        text = self.text if has_stop else self.text + self._detokenizer.end()
        positions = [position for stop_text in self._stop if (position := text.find(stop_text)) >= 0]
        return text[: min(positions, default=len(text))]


class ByteDetokenizer:
    """Detokenizer for tokenizers whose ids have fixed bytes, whatever precedes them."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        if tokenizer.unk is not None:
            token_bytes[tokenizer.unk] = tokenizer.decode([tokenizer.unk]).encode()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        return self._decoder.decode(self._token_bytes[token])

    def end(self) -> str:
        """Return the text that was held back."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """Detokenizer for all others, where the space before an id depends on the ids before it.

    An id's text is what `decode` returns beyond the text of the ids before it. Only the last ids that gave text are
    decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = list(prompt_ids)  # the last ids that gave text
        self._pending: list[int] = []  # ids since then

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        self._pending.append(token)
        text = self._decode_new_text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._emitted, self._pending = self._pending, []
        return text

    def end(self) -> str:
        """Return the text that was held back."""
        return self._decode_new_text()

    def _decode_new_text(self) -> str:
        decode = self._tokenizer.decode
        return decode([*self._emitted, *self._pending])[len(decode(self._emitted)) :]
