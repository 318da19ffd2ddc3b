"""The Tokenizer protocol, its special tokens and the files that name them, and the escaping of reserved ids in text."""

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import MegatfmError, UsageError

ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "unk": ("<unk>", "[UNK]"),
        "bos": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
        "eos": ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
        "mask": ("<mask>", "[MASK]"),
        "cls": ("<cls>", "[CLS]"),
        "sep": ("<sep>", "[SEP]"),
    }
)
"""Role → usual names of its token. The first one that a file has wins; our own files have the very first."""

MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"R": ("<R>", "[R]", "[NLU]"), "S": ("<S>", "[S]", "[S2S]"), "X": ("<X>", "[X]", "[NLG]")}
)
"""UL2's mode tokens (Tay et al. 2022, section 3.1.2): letter → our name, the paper's, that of its published models."""

SENTINEL = "<extra_{}>"
SENTINEL_PATTERN = re.compile(r"<extra_(?:id_)?(\d+)>")  # ours, T5's
SPACE_MARK = "\u2581"
"""SentencePiece's space in a piece. It may precede a special token, as in mT5's sentinels."""


@dataclass(frozen=True)
class SpecialTokenIds:
    """Reserved ids, which never come from text. unused: reserved ids that megatfm has no use for.

    The field names are part of a tokenizer's hash.
    """

    bos: int
    eos: int
    pad: int
    unk: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: tuple[int, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[int, ...] = ()

    @property
    def reserved(self) -> frozenset[int]:
        """All reserved ids."""
        roles = {getattr(self, role) for role in ROLES} - {None}
        return frozenset([*roles, *self.sentinels, *self.modes.values(), *self.unused])


def list_reserved_names(sentinels: int, modes: bool, without: tuple[str, ...] = ()) -> list[str]:
    """Return the names that our trained tokenizers reserve besides <unk>, in the order of the ids."""
    roles = [names[0] for role, names in ROLES.items() if role not in ("unk", *without)]
    mode_names = [names[0] for names in MODES.values()] if modes else []
    return [*roles, *(SENTINEL.format(index) for index in range(sentinels)), *mode_names]


def find_special_tokens(tokens: Mapping[str, int], role_names: Mapping[str, str], source: str) -> SpecialTokenIds:
    """Return the roles of a file's special tokens. tokens: text → id. role_names: role → text of its token, if stated.

    Roles without a token fall back as in BERT and GPT-2: `bos` to `cls` or `eos`, `eos` to `sep` or `bos`, `pad` to
    `eos`. Raises UsageError if no token can end a text.
    """
    roles = {role: _find_first_present(tokens, (role_names.get(role, ""), *names)) for role, names in ROLES.items()}
    bos, eos = roles["bos"], roles["eos"]
    bos = _find_first_known(bos, roles["cls"], eos)
    eos = _find_first_known(eos, roles["sep"], bos)
    if bos is None or eos is None:
        raise UsageError(
            f"{source}: no special token that could end a text, such as </s>, <|endoftext|> or [SEP]: give a tokenizer "
            "that has one, or train one with `megatfm prep`"
        )
    pad = _find_first_known(roles["pad"], eos)
    assert pad is not None
    # GPT-2's files also call <|endoftext|> the unknown token, though no text needs one.
    unk = roles["unk"] if roles["unk"] not in (bos, eos) else None
    special = SpecialTokenIds(
        bos, eos, pad, unk, roles["mask"], roles["cls"], roles["sep"], _find_sentinels(tokens), _find_modes(tokens)
    )
    unused = tuple(sorted(set(tokens.values()) - special.reserved))
    return SpecialTokenIds(**{**vars(special), "unused": unused})


def filter_special_token_names(pieces: Iterator[str] | list[str]) -> list[str]:
    """Return the pieces that are names of roles, modes or sentinels."""
    known_names = {name for group in (*ROLES.values(), *MODES.values()) for name in group}
    return [
        piece for piece in pieces if piece in known_names or SENTINEL_PATTERN.fullmatch(piece.removeprefix(SPACE_MARK))
    ]


def _find_first_present(tokens: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    return next((tokens[name] for name in names if name in tokens), None)


def _find_first_known(*tokens: int | None) -> int | None:
    return next((token for token in tokens if token is not None), None)


def _find_sentinels(tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sentinels' ids in the order 0, 1, …; T5's ids descend from <extra_id_0>, its last id."""
    token_by_index = {}
    for name, token in tokens.items():
        if match := SENTINEL_PATTERN.fullmatch(name.removeprefix(SPACE_MARK)):
            token_by_index[int(match[1])] = token
    sentinels: list[int] = []
    while len(sentinels) in token_by_index:
        sentinels.append(token_by_index[len(sentinels)])
    return tuple(sentinels)


def _find_modes(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return all three mode tokens, or none."""
    candidates = {letter: _find_first_present(tokens, names) for letter, names in MODES.items()}
    found_modes = {letter: token for letter, token in candidates.items() if token is not None}
    return found_modes if len(found_modes) == len(MODES) else {}


class Tokenizer(Protocol):
    """A map between text and ids, equal on every machine and with any number of threads.

    Reserved ids (`bos`, `eos`, `pad`, `unk`, `mask`, `cls`, `sep`, `sentinels`, `modes` and further ones of some files)
    never come from text, even if the text spells their names, and are decoded to nothing. Only `unk` is decoded, to the
    file's own mark for it.
    """

    kind: str
    """sentencepiece, sentencepiece-unigram, byte-bpe, wordpiece, …"""
    hash: str
    """BLAKE3 of the file, in hexadecimal, and of the reserved ids if a config beside it changes them."""
    vocab_size: int
    """One more than the largest id."""
    lossless: bool
    """Whether `decode(encode(text)) == text` for any Unicode text, and `byte_lengths` add up to its bytes."""
    special: SpecialTokenIds

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], threads: int) -> list[NDArray[np.int32]]:
        """Return the ids [n] of each text, without `bos` and `eos`. threads: number of threads that share the texts.

        Raises MegatfmError for a text with half a surrogate pair.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are no UTF-8, as a model may sample, become U+FFFD.

        Raises MegatfmError for an id beyond the vocabulary.
        """

    @abstractmethod
    def id_to_piece(self, token: int) -> str:
        """Return an id's piece as its library shows it, with U+2581, Ġ or another mark for a space.

        Returns "" for an id beyond the vocabulary.
        """

    @abstractmethod
    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes of each id [vocab_size], empty for reserved ids; None unless `lossless`."""

    @abstractmethod
    def word_starts(self) -> NDArray[np.bool_] | None:
        """Return whether each id begins a word [vocab_size], for whole-word masking; None if ids don't show it.

        A word begins with white space or its mark; in WordPiece with any piece without ##. So punctuation belongs to
        the word before it, except in WordPiece. The first word of a text may lack the mark. Reserved ids begin words.
        """

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids [n] of a text, without `bos` and `eos`. Raises MegatfmError for half a surrogate pair."""
        return self.encode_batch([text], threads=1)[0]

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Return the number of text bytes of each id [vocab_size]; None unless `lossless`."""
        token_bytes = self.token_bytes()
        return None if token_bytes is None else np.array(list(map(len, token_bytes)), np.int64)

    def describe(self) -> dict[str, Any]:
        """Return a JSON description for programs that don't load the tokenizer. Absent: lossless = true, no modes."""
        description: dict[str, Any] = {
            "kind": self.kind,
            "blake3": self.hash,
            "vocab_size": self.vocab_size,
            "reserved": {role: getattr(self.special, role) for role in ROLES},
            "sentinels": list(self.sentinels),
        }
        if self.modes:
            description["modes"] = dict(self.modes)
        if not self.lossless:
            description["lossless"] = False
        return description

    def validate_ids(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as a list. Raises MegatfmError for one beyond the vocabulary."""
        token_ids = [int(token) for token in ids]
        beyond = [token for token in token_ids if not 0 <= token < self.vocab_size]
        if beyond:
            raise MegatfmError(f"token id {beyond[0]} is not in this tokenizer's vocabulary of {self.vocab_size}")
        return token_ids

    @property
    def token_dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest type that holds every id, as shards store them."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def bos(self) -> int:
        """Id that begins a document: the file's `bos`, else `cls`, else `eos`."""
        return self.special.bos

    @property
    def eos(self) -> int:
        """Id that ends a document: the file's `eos`, else `sep`, else `bos`."""
        return self.special.eos

    @property
    def pad(self) -> int:
        """Id of padding: the file's `pad`, else `eos`."""
        return self.special.pad

    @property
    def unk(self) -> int | None:
        """Id of text that can't be encoded; None if every text can."""
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
        """Sentinel ids in the order of their use; T5's ids descend."""
        return self.special.sentinels

    @property
    def modes(self) -> Mapping[str, int]:
        """UL2's mode tokens: letter R, S or X → id; empty if there are none."""
        return self.special.modes


def check_unicode(texts: Iterable[str]) -> None:
    """Raise MegatfmError for the first text with half a surrogate pair."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MegatfmError(
                f"can't encode text: {error.reason} at character {error.start}: it is not Unicode"
            ) from None


def list_token_ids(ids: object) -> list[int]:
    """Return the ids in a value of a model's JSON, such as eos_token_id: one id, a list, or none."""
    return [token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int]


class ReservedTokenEscaper:
    """Replaces reserved ids, which a library finds in texts that spell their names, by the ids of the characters.

    replacements: reserved id → ids of its name's characters.
    """

    def __init__(self, replacements: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._replacements = {token: np.array(ids, np.int32) for token, ids in replacements.items()}
        self._is_reserved = np.zeros(vocab_size, np.bool_)
        self._is_reserved[list(replacements)] = True

    def __call__(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids [n] of a text without reserved ones; the same array if it has none."""
        indices = np.flatnonzero(self._is_reserved[ids]).tolist() if self._replacements else []
        segments, start = [], 0
        for index in indices:
            segments += [ids[start:index], self._replacements[int(ids[index])]]
            start = index + 1
        return np.concatenate([*segments, ids[start:]]) if segments else ids


TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Keys of further special tokens, a list or a table of names; the first one that has any is read."""


def parse_tokenizer_config(content: bytes | None, name: str, file: str = TOKENIZER_CONFIG) -> dict[str, Any]:
    """Return the values of a tokenizer_config.json; none without one. name: of the tokenizer. Raises UsageError."""
    try:
        values = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{name}: the {file} beside it is not valid: mend it or remove it")
    return values


def merge_special_tokens_map(config: bytes | None, names: bytes | None, name: str) -> bytes | None:
    """Return a tokenizer_config.json with the tokens of an older special_tokens_map.json, which go before its own.

    A config that lists `added_tokens_decoder` is complete. name: of the tokenizer. Raises UsageError.
    """
    if names is None:
        return config
    values = parse_tokenizer_config(config, name)
    named = parse_tokenizer_config(names, name, SPECIAL_TOKENS_MAP)
    changed = {key: value for key, value in named.items() if _get_token_text(value) != _get_token_text(values.get(key))}
    if "added_tokens_decoder" in values or not changed:
        return config
    return (
        json.dumps(values | {key: _get_token_text(value) for key, value in changed.items()}, indent=2).encode() + b"\n"
    )


def name_special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return key → text of the tokens that a tokenizer_config.json names: eos_token, or a model's own image_token."""
    extra = _find_extra_tokens(values)
    named = {key: value for key, value in values.items() if key.endswith("_token")}
    texts = {key: _get_token_text(value) for key, value in (named | (extra if isinstance(extra, dict) else {})).items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def list_extra_tokens(values: Mapping[str, Any]) -> list[str]:
    """Return the further special tokens of a tokenizer_config.json, which have no name."""
    extra = _get_token_text(_find_extra_tokens(values))
    return [text for text in extra if isinstance(text, str)] if isinstance(extra, list) else []


def _find_extra_tokens(values: Mapping[str, Any]) -> Any:
    return next((values[key] for key in EXTRA_TOKENS if values.get(key)), None)


def _get_token_text(token: Any) -> Any:
    """Return the text of a token, which may be a table with options, or of the tokens of a list."""
    if isinstance(token, list):
        return [_get_token_text(part) for part in token]
    return token.get("content", token) if isinstance(token, dict) else token
