"""Tokenizers of the `tokenizers` library (tokenizer.json): byte-level BPE, WordPiece, unigram and others."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal

import numpy as np
import tokenizers
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.errors import UsageError
from megatfm.tokenizers.base import (
    ROLES,
    SPACE_MARK,
    TOKENIZER_CONFIG,
    ReservedTokenEscaper,
    SpecialTokenIds,
    Tokenizer,
    check_unicode,
    find_special_tokens,
    list_extra_tokens,
    name_special_tokens,
    parse_tokenizer_config,
)

# The number of the library's own threads can't be set, and they warn at every fork. So they are off by default, and
# texts are shared among Python threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_KINDS = {"WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "word-level"}
# Post-processors that name the tokens around a text by their role.
_FRAMES = ("BertProcessing", "RobertaProcessing")
_NO_FRAME = b'  "post_processor": null,'
_OWN_FRAME = re.compile(rb'^  "post_processor": (?:null|\{"type": "TemplateProcessing".*\}),$', re.MULTILINE)
"""Line of a tokenizer.json without a post-processor, or with that of `set_frame`: the library writes several lines."""


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with the special tokens and their roles from a `tokenizer_config.json` beside it.

    It is lossless if it is a byte-level BPE that neither normalises text nor puts a space before it. data: content of
    tokenizer.json. config: content of tokenizer_config.json. name: for errors. Raises UsageError for other files.
    """

    def __init__(self, data: bytes, config: bytes | None = None, name: str = "tokenizer") -> None:
        data = _OWN_FRAME.sub(_NO_FRAME, data, count=1)
        self._tokenizer = _read(data, name)
        self._file = json.loads(self._tokenizer.to_str())  # in the format of the installed version
        self.special, extra_state = self._find_special_tokens(parse_tokenizer_config(config, name), name)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.hash = blake3(data + extra_state).hexdigest()
        self._is_bytes = any(part["type"] == "ByteLevel" for part in self._list_components("pre_tokenizer"))
        self.kind = _KINDS.get(self._file["model"]["type"], "byte-bpe" if self._is_bytes else "bpe")
        self._bytes = self._list_bytes()
        self.lossless = self._bytes is not None
        self._skipped_ids = self.special.reserved - {self.special.unk}
        # A unigram model may have </s> among its pieces, and would find it in HTML.
        pieces = {token: self._tokenizer.model.id_to_token(token) for token in self._skipped_ids}
        self._escape_reserved = ReservedTokenEscaper(
            {token: self._list_character_ids(piece) for token, piece in pieces.items() if piece}, self.vocab_size
        )

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        n_threads = max(1, min(threads, len(texts)))
        texts_by_thread = [texts[thread::n_threads] for thread in range(n_threads)]
        try:
            if n_threads == 1:
                encoded = [self._encode(texts)]
            else:
                with ThreadPoolExecutor(n_threads) as pool:
                    encoded = list(pool.map(self._encode, texts_by_thread))
        except (TypeError, UnicodeEncodeError):
            check_unicode(texts)
            raise
        return [encoded[thread % n_threads][thread // n_threads] for thread in range(len(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = [token for token in self.validate_ids(ids) if token not in self._skipped_ids]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def id_to_piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self) -> list[bytes] | None:
        return None if self._bytes is None else list(self._bytes)

    def word_starts(self) -> NDArray[np.bool_] | None:
        begins_word = self._make_word_start_test()
        if begins_word is None:
            return None
        pieces = [self.id_to_piece(token) for token in range(self.vocab_size)]
        starts = np.array(list(map(begins_word, pieces)), np.bool_)
        for token, added_token in self._list_added_tokens().items():
            starts[token] = added_token.content[:1].isspace() or begins_word(added_token.content)
        starts[list(self.special.reserved)] = True
        return starts

    @property
    def reserved_spellings(self) -> list[str]:
        """Spellings that `encode_with_offsets` reads as special tokens."""
        return list(self._list_special_tokens())

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Encode a text in which special tokens are spelled out; return ids [n] and their characters (begin, end).

        Raises MegatfmError for half a surrogate pair.
        """
        check_unicode([text])
        encoding = self._special_reader.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), list(encoding.offsets)

    def encode_text_with_offsets(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids [n] of `encode`, and begin and end of each one's characters [n, 2]. Raises MegatfmError."""
        check_unicode([text])
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
        if not np.isin(ids, list(self._skipped_ids)).any():
            return ids, offsets
        escaped = [self._escape_reserved(ids[index : index + 1].astype(np.int32)) for index in range(len(ids))]
        return np.concatenate(escaped).astype(np.int64), np.repeat(offsets, list(map(len, escaped)), axis=0)

    @cached_property
    def _special_reader(self) -> tokenizers.Tokenizer:
        """A copy of the library's tokenizer that reads special tokens in text."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = False
        return copy

    def find_pair_template(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
        """Return the special tokens that the post-processor adds before, between and after two texts.

        None if it adds none, or adds them elsewhere.
        """
        first, second = (self._tokenizer.encode("a", add_special_tokens=False) for _ in range(2))
        if not first.ids or self._tokenizer.post_processor is None:
            return None
        n = len(first.ids)
        pair = self._tokenizer.post_process(first, second, add_special_tokens=True)
        text_positions = [position for position, is_special in enumerate(pair.special_tokens_mask) if not is_special]
        if len(pair.ids) == 2 * n or len(text_positions) != 2 * n:
            return None
        before, between, after = (
            pair.ids[: text_positions[0]],
            pair.ids[text_positions[n - 1] + 1 : text_positions[n]],
            pair.ids[text_positions[-1] + 1 :],
        )
        single = self._tokenizer.post_process(first, add_special_tokens=True).ids
        return (tuple(before), tuple(between), tuple(after)) if single == [*before, *first.ids, *after] else None

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._escape_reserved(np.array(encoding.ids, np.int32)) for encoding in encodings]

    def _find_special_tokens(self, config: Mapping[str, Any], name: str) -> tuple[SpecialTokenIds, bytes]:
        """Return the reserved ids, and JSON to hash with the file if the config beside it changes them.

        Further special tokens that the file lacks get the next ids, as in transformers. Those that a config names, such
        as an image_token, may come from text, where the file says no more.
        """
        named, frame = name_special_tokens(config), self._find_post_processor_roles()
        role_names = {role: named[f"{role}_token"] for role in ROLES if f"{role}_token" in named}
        try:
            from_file = find_special_tokens(self._list_special_tokens(), frame, name)
        except UsageError:
            from_file = None
            if not role_names:
                raise
        for role, piece in role_names.items():
            if self._tokenizer.token_to_id(piece) is None:
                raise UsageError(
                    f"{name}: has no {piece!r}, which {TOKENIZER_CONFIG} beside it calls its {role}_token: load both "
                    "with transformers' AutoTokenizer and save them again"
                )
        self._tokenizer.add_special_tokens([*role_names.values(), *list_extra_tokens(config)])
        special = find_special_tokens(self._list_special_tokens(), {**frame, **role_names}, name)
        return special, b"" if special == from_file else json.dumps(vars(special), sort_keys=True).encode()

    def _list_special_tokens(self) -> dict[str, int]:
        return {
            added_token.content: token
            for token, added_token in self._list_added_tokens().items()
            if added_token.special
        }

    def _list_added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Added tokens by id: found in text before the model runs."""
        return self._tokenizer.get_added_tokens_decoder()

    def _find_post_processor_roles(self) -> dict[str, str]:
        """Return role → token text, from the file's post-processor."""
        parts = (part for part in self._list_components("post_processor") if part["type"] in _FRAMES)
        return {role: part[role][0] for part in parts for role in ("cls", "sep")}

    def _list_components(self, section: str) -> list[dict[str, Any]]:
        """Return the components of a section of the file, with nested sequences flattened."""
        return list(_flatten(self._file[section]))

    def _list_character_ids(self, piece: str) -> list[int]:
        """Return the ids of a piece's single characters."""
        characters = "".join(_BYTE_CHARACTERS[byte] for byte in piece.encode()) if self._is_bytes else piece
        return [token.id for character in characters for token in self._tokenizer.model.tokenize(character)]

    def _list_bytes(self) -> list[bytes] | None:
        """Return the bytes of each id [vocab_size] if encoding and decoding keep every byte; else None."""
        model = self._file["model"]
        has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        steps = self._list_components("pre_tokenizer")
        added = {
            token: added_token
            for token, added_token in self._list_added_tokens().items()
            if token not in self.special.reserved
        }
        if (
            model["type"] != "BPE"
            or has_affixes
            or self._list_components("normalizer")
            or not all(map(_is_lossless, steps))
            or [step["type"] for step in steps].count("ByteLevel") != 1
            or [step["type"] for step in self._list_components("decoder")] != ["ByteLevel"]
            or any(self._tokenizer.model.token_to_id(character) is None for character in _BYTE_CHARACTERS)
            or any(added_token.lstrip or added_token.rstrip for added_token in added.values())
            or any(self._tokenizer.decode([token]) != added_token.content for token, added_token in added.items())
        ):
            return None
        result = []
        for token in range(self.vocab_size):
            if token in self.special.reserved:
                result.append(b"")
            elif token in added:
                result.append(added[token].content.encode())
            else:
                result.append(_to_bytes(self.id_to_piece(token)))
        return result

    def _make_word_start_test(self) -> Callable[[str], bool] | None:
        """Return a test whether a piece begins a word; None if pieces don't show it."""
        model = self._file["model"]
        if model["type"] == "WordLevel":
            return lambda piece: True
        if prefix := model.get("continuing_subword_prefix"):
            return lambda piece: not piece.startswith(prefix)
        if self._is_bytes:
            return lambda piece: piece.startswith(_SPACES)
        components = [
            *self._list_components("pre_tokenizer"),
            *self._list_components("normalizer"),
            *self._list_components("decoder"),
        ]
        if any(SPACE_MARK in json.dumps(component, ensure_ascii=False) for component in components):
            return lambda piece: piece.startswith((SPACE_MARK, *" \t\n\r\f\v"))
        return None


def set_frame(data: bytes, before: Sequence[int], between: Sequence[int], after: Sequence[int]) -> bytes:
    """Return a tokenizer.json with which transformers puts these special tokens around a text, or a pair of texts.

    To megatfm it is the same tokenizer, of the same hash. A file with another post-processor is returned as it is.
    """
    if not _OWN_FRAME.search(data):
        return data
    if not (before or between or after):
        return _OWN_FRAME.sub(_NO_FRAME, data, count=1)
    library = tokenizers.Tokenizer.from_buffer(data)
    pieces = {token: library.id_to_token(token) for token in (*before, *between, *after)}
    first, middle, last = ([pieces[token] for token in ids] for ids in (before, between, after))
    head = [f"{piece}:0" for piece in first] + ["$A:0"]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*head, *(f"{piece}:0" for piece in last)],
        pair=[*head, *(f"{piece}:0" for piece in middle), "$B:1", *(f"{piece}:1" for piece in last)],
        special_tokens=[(piece, token) for token, piece in pieces.items()],
    )
    line = f'  "post_processor": {json.dumps(json.loads(library.to_str())["post_processor"])},'.encode()
    return _OWN_FRAME.sub(lambda _: line, data, count=1)


def remove_frame(data: bytes) -> bytes:
    """Return a tokenizer.json without a post-processor of others; one without any stays the same file."""
    if find_frame_kind(data) != "foreign":
        return data
    return json.dumps(json.loads(data) | {"post_processor": None}, indent=2, ensure_ascii=False).encode() + b"\n"


def find_frame_kind(data: bytes) -> Literal["none", "own", "foreign"]:
    """Return whether a tokenizer.json has no post-processor, one of `set_frame`, or one of others."""
    match = _OWN_FRAME.search(data)
    return "foreign" if match is None else "none" if match[0] == _NO_FRAME else "own"


def _read(data: bytes, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer without truncation, padding, dropout and special tokens in text."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises a bare Exception
        raise UsageError(
            f"{name}: not a tokenizer.json of the tokenizers library ({error}): give one, or a tokenizer.model"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a text that spells </s> does not end there
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _flatten(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for steps in component.values():
        if isinstance(steps, list):
            for step in steps:
                yield from _flatten(step)


def _is_lossless(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenization step keeps every byte of the text."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] in ("Split", "Digits", "Punctuation") and step.get("behavior") != "Removed"


def _list_byte_characters() -> list[str]:
    """Return GPT-2's character of each byte: itself if visible in Latin-1, else one from U+0100 on.

    Radford et al. 2019, section 2.2; the table is that of their code.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


_BYTE_CHARACTERS = _list_byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}
_SPACES = tuple(_BYTE_CHARACTERS[byte] for byte in b" \t\n\r\f\v")


def _to_bytes(piece: str) -> bytes:
    """Return a piece's bytes. A piece with another character is taken literally, as by the library."""
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode()
