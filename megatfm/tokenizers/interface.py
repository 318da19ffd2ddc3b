"""What every tokenizer can do, whatever library is behind it."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError
from megatfm.tokenizers.special import ROLES, Special


class Tokenizer(Protocol):
    """A map between text and ids. The same text gives the same ids, on every machine and with any threads.

    Reserved ids (`bos`, `eos`, `pad`, `unk`, `mask`, `cls`, `sep`, `sentinels`, `modes` and some files' others) never
    come from text, even where a text spells their names, and are decoded to nothing. The exception is `unk`, which is
    decoded to the file's own mark for it.
    """

    kind: str
    """sentencepiece, sentencepiece-unigram, byte-bpe, wordpiece, …"""
    hash: str
    """BLAKE3 of the file, and of what a file beside it says of reserved ids if it is not what the names say."""
    vocab_size: int
    """One more than the largest id."""
    lossless: bool
    """Whether `decode(encode(text)) == text` for any Unicode text, and `byte_lengths` add up to its bytes."""
    special: Special

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        """The ids of each text, without `bos` and `eos`. The texts are shared among `threads`.

        A MegatfmError if one holds half a surrogate pair.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8, as a model may sample, become U+FFFD.

        A MegatfmError for an id beyond the vocabulary.
        """

    @abstractmethod
    def id_to_piece(self, token: int) -> str:
        """An id as its library shows it, with U+2581, Ġ or another mark for a space."""

    @abstractmethod
    def token_bytes(self) -> list[bytes] | None:
        """The bytes that each id stands for wherever it stands [vocab_size]; None unless `lossless`.

        Reserved ids stand for none.
        """

    @abstractmethod
    def word_starts(self) -> NDArray[np.bool_] | None:
        """Whether each id begins a word [vocab_size], for masking whole words; reserved ids do.

        A word begins with the mark of a space, or with any white space, or in WordPiece wherever ## is not. So
        punctuation belongs to the word before it but in WordPiece; and at the start of a text the mark may be missing.
        None if no id tells.
        """

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids [n] of a text, without `bos` and `eos`. A MegatfmError if it holds half a surrogate pair."""
        return self.encode_batch([text], threads=1)[0]

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """How many bytes of text each id stands for [vocab_size]; None unless `lossless`."""
        spelled = self.token_bytes()
        return None if spelled is None else np.array([len(each) for each in spelled], np.int64)

    def describe(self) -> dict[str, Any]:
        """The facts for programs that don't load it. What most have alike is left out: lossless, no modes."""
        facts: dict[str, Any] = {
            "kind": self.kind,
            "blake3": self.hash,
            "vocab_size": self.vocab_size,
            "reserved": {role: getattr(self.special, role) for role in ROLES},
            "sentinels": list(self.sentinels),
        }
        if self.modes:
            facts["modes"] = dict(self.modes)
        if not self.lossless:
            facts["lossless"] = False
        return facts

    def validate_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids as a list. Raises MegatfmError for one beyond the vocabulary."""
        listed = [int(token) for token in ids]
        beyond = [token for token in listed if not 0 <= token < self.vocab_size]
        if beyond:
            raise MegatfmError(
                f"token id {beyond[0]} is not in this tokenizer's vocabulary of {self.vocab_size}"
            )
        return listed

    @property
    def token_dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest type that holds every id, as shards store them: "uint16" or "uint32"."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def bos(self) -> int:
        """Begins a document: the file's own, else `cls`, else `eos`."""
        return self.special.bos

    @property
    def eos(self) -> int:
        """Ends a document: the file's own, else `sep`, else `bos`."""
        return self.special.eos

    @property
    def pad(self) -> int:
        """Fills rows: the file's own, else `eos`."""
        return self.special.pad

    @property
    def unk(self) -> int | None:
        """Stands for what can't be spelled; None if everything can be."""
        return self.special.unk

    @property
    def mask(self) -> int | None:
        return self.special.mask

    @property
    def cls(self) -> int | None:
        return self.special.cls

    @property
    def sep(self) -> int | None:
        return self.special.sep

    @property
    def sentinels(self) -> tuple[int, ...]:
        """In the order in which spans use them; T5's ids descend."""
        return self.special.sentinels

    @property
    def modes(self) -> Mapping[str, int]:
        """UL2's mode tokens by letter: R, S, X; empty if there are none."""
        return self.special.modes


def check_unicode(texts: Iterable[str]) -> None:
    """Raise a MegatfmError for the first text that holds half a surrogate pair."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MegatfmError(
                f"can't encode text: {error.reason} at character {error.start}: it is not Unicode"
            ) from None
