"""A SentencePiece model as a lossless map between text and ids."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.errors import MegatfmError, UsageError

# SentencePiece writes a space in a piece as U+2581, so a U+2581 of the text would come back as a space. Such a
# character is therefore spelled in byte pieces, as SentencePiece itself spells every rare character.
_SPACE_MARK = "\u2581"
_SPACE_MARK_PIECES = tuple(f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode())

MASK, CLASS, SEPARATOR, SENTINEL = "<mask>", "<cls>", "<sep>", "<extra_{}>"


class Tokenizer:
    """Encodes text into ids and back; for any Unicode text, `decode(encode(text)) == text`.

    Reserved ids (`bos`, `eos`, `pad`, `unk`, `mask`, `cls`, `sep`, `sentinels`) never come from text and are
    decoded to nothing, but for `unk`, which becomes U+FFFD. `mask`, `cls` and `sep` are None in a model that was
    not trained here.
    """

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        self._sp = sentencepiece.SentencePieceProcessor()
        try:
            self._sp.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UsageError(
                f"{name}: not a SentencePiece model: give the tokenizer.model of a prepared corpus"
            ) from None
        if not model or self._sp.bos_id() < 0 or self._sp.eos_id() < 0:
            raise UsageError(f"{name}: a model without <s> and </s>: train one with `megatfm prep`")
        mark = [self._sp.piece_to_id(piece) for piece in _SPACE_MARK_PIECES]
        if self._sp.unk_id() in mark:
            raise UsageError(
                f"{name}: a model without byte pieces loses rare characters: train with byte_fallback"
            )
        self._space_mark = np.array(mark, np.int32)
        self.hash: str = blake3(model).hexdigest()
        self.vocab_size: int = self._sp.vocab_size()
        self.bos: int = self._sp.bos_id()
        self.eos: int = self._sp.eos_id()
        self.unk: int = self._sp.unk_id()
        self.pad: int = self._sp.pad_id() if self._sp.pad_id() >= 0 else self.eos
        self.mask, self.cls, self.sep = (self._reserved(piece) for piece in (MASK, CLASS, SEPARATOR))
        self.sentinels: range = self._sentinels()

    @property
    def token_dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest type that holds every id, as shards store them: "uint16" or "uint32"."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids [n] of a text, without `bos` and `eos`. A MegatfmError if it holds half a surrogate pair."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        """The ids of each text. The texts are shared among `threads`; the result does not depend on them."""
        parts = [part for text in texts for part in text.split(_SPACE_MARK)]
        try:
            encoded = iter(
                self._sp.encode([part.encode() for part in parts], return_type="numpy", num_threads=threads)
            )
        except UnicodeEncodeError as error:
            raise MegatfmError(
                f"can't encode text: {error.reason} at character {error.start}: it is not Unicode"
            ) from None
        result = []
        for text in texts:
            ids = [next(encoded)]
            for _ in range(text.count(_SPACE_MARK)):
                ids += [self._space_mark, next(encoded)]
            result.append(np.concatenate(ids))  # a copy, as SentencePiece's arrays can't be written to
        return result

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8, as a model may sample, become U+FFFD."""
        listed = [int(token) for token in ids]
        beyond = [token for token in listed if not 0 <= token < self.vocab_size]
        if beyond:
            raise MegatfmError(
                f"token id {beyond[0]} is not in this tokenizer's vocabulary of {self.vocab_size}"
            )
        return str(self._sp.decode(listed))

    def describe(self) -> dict[str, Any]:
        """The facts that `tokenizer.json` tells programs which don't load the model."""
        names = ("unk", "bos", "eos", "pad", "mask", "cls", "sep")
        return {
            "kind": "sentencepiece",
            "blake3": self.hash,
            "vocab_size": self.vocab_size,
            "reserved": {name: getattr(self, name) for name in names},
            "sentinels": list(self.sentinels),
        }

    def byte_lengths(self) -> NDArray[np.int64]:
        """How many bytes of text each id stands for [vocab_size]; reserved ids stand for none."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token in range(self.vocab_size):
            if self._sp.is_byte(token):
                lengths[token] = 1
            elif not self._sp.is_control(token) and not self._sp.is_unknown(token):
                lengths[token] = len(self.piece(token).replace(_SPACE_MARK, " ").encode())
        return lengths

    def piece(self, token: int) -> str:
        """The piece of an id as SentencePiece shows it, with U+2581 for a space."""
        return str(self._sp.id_to_piece(token))

    def _reserved(self, piece: str) -> int | None:
        token = self._sp.piece_to_id(piece)
        return int(token) if token != self.unk and self._sp.is_control(token) else None

    def _sentinels(self) -> range:
        first = self._reserved(SENTINEL.format(0))
        if first is None:
            return range(0)
        last = first
        while last < self.vocab_size and self._reserved(SENTINEL.format(last - first)) == last:
            last += 1
        return range(first, last)


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.model` file. Raises UsageError if there is none or it is something else."""
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: can't read the tokenizer ({error.strerror}): make one with `megatfm prep`"
        ) from error
    return Tokenizer(model, str(path))
