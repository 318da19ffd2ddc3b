"""SentencePiece models, and tokenizer.json files of them. Those trained by megatfm map text to ids without loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers

from megatfm.errors import UsageError
from megatfm.tokenizers.base import (
    SPACE_MARK,
    ReservedTokenEscaper,
    Tokenizer,
    check_unicode,
    filter_special_token_names,
    find_special_tokens,
)

_BYTE = "<0x{:02X}>"
UNIGRAM, BPE = 1, 2
"""model_type of sentencepiece_model.proto."""
# model_type → kind. BPE is "sentencepiece", for it was the only one once.
_KINDS = {UNIGRAM: "sentencepiece-unigram", BPE: "sentencepiece", 3: "sentencepiece-word", 4: "sentencepiece-char"}
_TRAINER, _NORMALIZER = 2, 3  # field numbers of TrainerSpec and NormalizerSpec


def encode_between_metaspaces(
    texts: Sequence[str], encode: Callable[[list[str]], Sequence[NDArray[np.int32]]], mark_ids: NDArray[np.int32]
) -> list[NDArray[np.int32]]:
    """Return the ids of texts: segments between U+2581 are encoded in one batch, and each U+2581 becomes `mark_ids`.

    SentencePiece writes a space in a piece as U+2581, so a U+2581 of the text would be decoded to a space. Byte pieces,
    which SentencePiece uses for rare characters, keep it.
    """
    segments = iter(encode([segment for text in texts for segment in text.split(SPACE_MARK)]))
    ids_by_text = []
    for text in texts:
        ids = [next(segments)]
        for _ in range(text.count(SPACE_MARK)):
            ids += [mark_ids, next(segments)]
        ids_by_text.append(ids[0] if len(ids) == 1 else np.concatenate(ids))
    return ids_by_text


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`, lossless unless it normalises text, adds a space before it or lacks byte pieces.

    model: content of the file. name: for errors. Raises UsageError for other files.
    """

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        self._sp = sentencepiece.SentencePieceProcessor()
        try:
            self._sp.LoadFromSerializedProto(model)
        except RuntimeError:
            raise UsageError(
                f"{name}: not a SentencePiece model: give the tokenizer.model of a prepared corpus"
            ) from None
        settings = read_settings(model)
        self._word_start_is_marked = not settings["treat_whitespace_as_suffix"]
        self.kind = _KINDS.get(settings["model_type"], "sentencepiece")
        self.hash = blake3(model).hexdigest()
        self.vocab_size = self._sp.vocab_size()
        ids = {role: getattr(self._sp, f"{role}_id")() for role in ("unk", "bos", "eos", "pad")}
        role_names = {role: self.id_to_piece(token) for role, token in ids.items() if token >= 0}
        special_tokens = {
            self.id_to_piece(token): token for token in range(self.vocab_size) if self._is_reserved(token)
        }
        special_tokens |= {piece: ids[role] for role, piece in role_names.items()}
        user_defined = self._find_user_defined(settings["user_defined_symbols"])
        self.special = find_special_tokens({**special_tokens, **user_defined}, role_names, name)
        byte_tokens = [self._sp.piece_to_id(_BYTE.format(byte)) for byte in range(256)]
        self.lossless = all(map(self._sp.is_byte, byte_tokens)) and not settings["changes_text"]
        self._space_mark = np.array([byte_tokens[byte] for byte in SPACE_MARK.encode()], np.int32)
        self._escape_reserved = ReservedTokenEscaper(
            {token: self._list_character_ids(piece) for piece, token in user_defined.items()}, self.vocab_size
        )

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        if not self.lossless:
            return [self._escape_reserved(ids) for ids in self._encode(texts, threads)]
        ids_by_text = encode_between_metaspaces(texts, lambda parts: self._encode(parts, threads), self._space_mark)
        return [self._escape_reserved(ids) for ids in ids_by_text]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._sp.decode(self.validate_ids(ids)))

    def id_to_piece(self, token: int) -> str:
        return str(self._sp.id_to_piece(token)) if token < self.vocab_size else ""

    def token_bytes(self) -> list[bytes] | None:
        if not self.lossless:
            return None
        return [self._get_bytes(token) for token in range(self.vocab_size)]

    def word_starts(self) -> NDArray[np.bool_] | None:
        if not self._word_start_is_marked:
            return None
        pieces = (self.id_to_piece(token) for token in range(self.vocab_size))
        starts = np.array([piece.startswith((SPACE_MARK, *" \t\n\r\f\v")) for piece in pieces], np.bool_)
        starts[list(self.special.reserved)] = True
        return starts

    def _encode(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        """Return writable copies of SentencePiece's read-only arrays."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError:
            check_unicode(texts)
            raise
        return [ids.copy() for ids in self._sp.encode(encoded, return_type="numpy", num_threads=threads)]

    def _get_bytes(self, token: int) -> bytes:
        piece = self.id_to_piece(token)
        if self._sp.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return b"" if token in self.special.reserved else piece.replace(SPACE_MARK, " ").encode()

    def _is_reserved(self, token: int) -> bool:
        return bool(self._sp.is_control(token) or self._sp.is_unknown(token))

    def _find_user_defined(self, symbols: Iterable[str]) -> Mapping[str, int]:
        """Return name → id of reserved names among the user-defined symbols, which SentencePiece finds in text."""
        return {
            piece: token
            for piece in filter_special_token_names(list(symbols))
            if not self._is_reserved(token := self._sp.piece_to_id(piece))
        }

    def _list_character_ids(self, piece: str) -> list[int]:
        """Return the ids of a piece's single characters."""
        ids: list[int] = []
        for character in piece:
            token = self._sp.piece_to_id(character)
            byte_tokens = [self._sp.piece_to_id(_BYTE.format(byte)) for byte in character.encode()]
            ids += [token] if token != self._sp.unk_id() else byte_tokens
        return ids


# A subset of protobuf's wire format, enough for SentencePiece's files. The protobuf package is no alternative: its
# version must fit the one that SentencePiece was built with.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types (protobuf.dev/programming-guides/encoding)."""


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Read the varint at `offset`; return its value and the offset behind it."""
    value, shift = 0, 0
    while data[offset] & 0x80:
        value |= (data[offset] & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
    return value | data[offset] << shift, offset + 1


def encode_varint(value: int) -> bytes:
    """Encode an integer as a varint, seven bits to a byte."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def read_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message in order; values of fixed width stay bytes."""
    offset = 0
    while offset < len(message):
        tag, offset = read_varint(message, offset)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, offset = read_varint(message, offset)
            yield number, value
            continue
        if kind == BYTES:
            size, offset = read_varint(message, offset)
        else:
            size = {FIXED64: 8, FIXED32: 4}[kind]
        yield number, message[offset : offset + size]
        offset += size


def read_settings(model: bytes) -> dict[str, Any]:
    """Return a model's settings of text, with the field numbers and defaults of sentencepiece_model.proto."""
    messages = {number: dict[int, Any]() for number in (_TRAINER, _NORMALIZER)}
    symbols = []
    for number, value in read_fields(model):
        if number in messages and isinstance(value, bytes):
            for key, item in read_fields(value):
                messages[number][key] = item
                if (number, key) == (_TRAINER, 31) and isinstance(item, bytes):
                    symbols.append(item.decode())
    trainer, normalizer = messages[_TRAINER], messages[_NORMALIZER]
    settings = {
        "model_type": trainer.get(3, UNIGRAM),
        "treat_whitespace_as_suffix": bool(trainer.get(24, False)),
        "user_defined_symbols": symbols,
        "precompiled_charsmap": normalizer.get(2, b""),
        "add_dummy_prefix": bool(normalizer.get(3, True)),
        "remove_extra_whitespaces": bool(normalizer.get(4, True)),
        "escape_whitespaces": bool(normalizer.get(5, True)),
    }
    changing = ("treat_whitespace_as_suffix", "precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces")
    return settings | {"changes_text": any(settings[key] for key in changing) or not settings["escape_whitespaces"]}


def make_tokenizer_json(model: bytes) -> bytes | None:
    """Return a tokenizer.json that gives the ids of a SentencePiece model; None if the library can't express it.

    model: content of the `.model`. The result names its hash, by which `load` takes the model itself. Text that spells
    a special token or a byte's piece, or contains U+2581, becomes that token, byte or a space.
    """
    settings, tokenizer = read_settings(model), SentencePieceTokenizer(model)
    reserved = [tokenizer.id_to_piece(token) for token in sorted(tokenizer.special.reserved)]
    if (
        settings["model_type"] not in (BPE, UNIGRAM)
        or settings["treat_whitespace_as_suffix"]
        or not settings["escape_whitespaces"]
        or not set(settings["user_defined_symbols"]) <= set(reserved)
    ):
        return None
    library = tokenizers.Tokenizer(_make_model(model, settings["model_type"]))
    library.normalizer = normalizers.Sequence(_list_normalizers(settings))
    prefix = [decoders.Strip(content=" ", left=1)] * settings["add_dummy_prefix"]
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
    )
    library.add_special_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in reserved])
    content = library.to_str(pretty=True)
    kind = '  "model": {\n    "type": "' + type(library.model).__name__ + '",\n'
    assert kind in content
    return content.replace(kind, f'{kind}    "blake3": "{tokenizer.hash}",\n', 1).encode()


def _make_model(model: bytes, model_type: int) -> models.Model:
    """Return the pieces as a model of the library. BPE merges what makes the piece of the highest score first."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [(processor.id_to_piece(token), processor.get_score(token)) for token in range(processor.vocab_size())]
    unknown, has_bytes = processor.unk_id(), processor.is_byte(processor.piece_to_id("<0x00>"))
    if model_type == UNIGRAM:
        return models.Unigram(pieces, unknown, has_bytes)
    is_fixed = [
        any(getattr(processor, f"is_{kind}")(token) for kind in ("control", "unknown", "unused", "byte"))
        for token in range(len(pieces))
    ]
    ranks = {piece: (-score, token) for token, (piece, score) in enumerate(pieces) if not is_fixed[token]}
    merges = sorted(
        (rank, piece[:end], piece[end:])
        for piece, rank in ranks.items()
        for end in range(1, len(piece))
        if piece[:end] in ranks and piece[end:] in ranks
    )
    return models.BPE(
        vocab={piece: token for token, (piece, _) in enumerate(pieces)},
        merges=[(left, right) for _, left, right in merges],
        unk_token=pieces[unknown][0],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _list_normalizers(settings: Mapping[str, Any]) -> list[normalizers.Normalizer]:
    """Return what SentencePiece does to a text, in its order."""
    steps: list[normalizers.Normalizer] = []
    if settings["precompiled_charsmap"]:
        steps.append(normalizers.Precompiled(settings["precompiled_charsmap"]))
    if settings["remove_extra_whitespaces"]:
        ends, runs = tokenizers.Regex(r"\A +| +\z"), tokenizers.Regex(" {2,}")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    if settings["add_dummy_prefix"]:
        steps.append(normalizers.Prepend(SPACE_MARK))
    return [*steps, normalizers.Replace(" ", SPACE_MARK)]
