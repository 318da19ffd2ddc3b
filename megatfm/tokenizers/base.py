"""The Tokenizer protocol, its special tokens and how they are found, and how reserved ids are kept out of text."""

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
"""The usual names of each role, the first one that a file has wins; the very first is that of our own files."""

MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"R": ("<R>", "[R]", "[NLU]"), "S": ("<S>", "[S]", "[S2S]"), "X": ("<X>", "[X]", "[NLG]")}
)
"""UL2's mode tokens (Tay et al. 2022, section 3.1.2) by letter: ours, the paper's, those of its published models."""

SENTINEL = "<extra_{}>"
SENTINEL_PATTERN = re.compile(r"<extra_(?:id_)?(\d+)>")  # ours, T5's
SPACE_MARK = "\u2581"
"""SentencePiece's space in a piece. It may stand before a special token, as before mT5's sentinels."""


@dataclass(frozen=True)
class Special:
    """Ids that never come from text. `unused` are reserved, too, for something that megatfm has no use for."""

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
        """Return all of them."""
        roles = {getattr(self, role) for role in ROLES} - {None}
        return frozenset([*roles, *self.sentinels, *self.modes.values(), *self.unused])


def reserved_names(sentinels: int, modes: bool, without: tuple[str, ...] = ()) -> list[str]:
    """Return the names that our own trainings reserve besides <unk>, in the order of the ids."""
    roles = [usual[0] for role, usual in ROLES.items() if role not in ("unk", *without)]
    mode_names = [usual[0] for usual in MODES.values()] if modes else []
    return [*roles, *(SENTINEL.format(number) for number in range(sentinels)), *mode_names]


def find_special_tokens(tokens: Mapping[str, int], role_names: Mapping[str, str], source: str) -> Special:
    """The roles of a file's special tokens (text → id); `role_names` says for some roles which token has them.

    A role without a token of its own goes to the one that does its work elsewhere: documents begin with `cls` or `eos`
    and end with `sep` or `bos`, as BERT's and GPT-2's do, and `eos` pads. Raises UsageError if nothing can end a text.
    """
    roles = {
        role: _first_present(tokens, (role_names.get(role, ""), *usual)) for role, usual in ROLES.items()
    }
    bos, eos = roles["bos"], roles["eos"]
    bos = _first_known(bos, roles["cls"], eos)
    eos = _first_known(eos, roles["sep"], bos)
    if bos is None or eos is None:
        raise UsageError(
            f"{source}: no special token that could end a text, such as </s>, <|endoftext|> or [SEP]: give a tokenizer "
            "that has one, or train one with `megatfm prep`"
        )
    pad = _first_known(roles["pad"], eos)
    assert pad is not None
    # GPT-2's <|endoftext|> is called its unknown token as well, though it has none.
    unk = roles["unk"] if roles["unk"] not in (bos, eos) else None
    special = Special(
        bos, eos, pad, unk, roles["mask"], roles["cls"], roles["sep"], _sentinels(tokens), _modes(tokens)
    )
    unused = tuple(sorted(set(tokens.values()) - special.reserved))
    return Special(**{**vars(special), "unused": unused})


def special_token_names(pieces: Iterator[str] | list[str]) -> list[str]:
    """Pieces of a file that have the name of a role, a mode or a sentinel."""
    usual = {name for group in (*ROLES.values(), *MODES.values()) for name in group}
    return [p for p in pieces if p in usual or SENTINEL_PATTERN.fullmatch(p.removeprefix(SPACE_MARK))]


def _first_present(tokens: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    return next((tokens[name] for name in names if name in tokens), None)


def _first_known(*tokens: int | None) -> int | None:
    return next((token for token in tokens if token is not None), None)


def _sentinels(tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Return sentinels by their numbers: T5's ids descend from <extra_id_0>, the last of its vocabulary."""
    numbered = {}
    for name, token in tokens.items():
        if match := SENTINEL_PATTERN.fullmatch(name.removeprefix(SPACE_MARK)):
            numbered[int(match[1])] = token
    result: list[int] = []
    while len(result) in numbered:
        result.append(numbered[len(result)])
    return tuple(result)


def _modes(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return all three mode tokens, or none."""
    mode_tokens = {letter: _first_present(tokens, usual) for letter, usual in MODES.items()}
    mode_token_of = {letter: token for letter, token in mode_tokens.items() if token is not None}
    return mode_token_of if len(mode_token_of) == len(MODES) else {}


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
        """Bytes of text that each id stands for [vocab_size]; None unless `lossless`."""
        token_bytes = self.token_bytes()
        return None if token_bytes is None else np.array(list(map(len, token_bytes)), np.int64)

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
        token_ids = [int(token) for token in ids]
        beyond = [token for token in token_ids if not 0 <= token < self.vocab_size]
        if beyond:
            raise MegatfmError(
                f"token id {beyond[0]} is not in this tokenizer's vocabulary of {self.vocab_size}"
            )
        return token_ids

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
        """Placeholder for text that can't be encoded; None if everything can be."""
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


class ReservedTokenEscaper:
    """Replaces reserved ids, which a library may find in a text that spells their names, by the ids of the names'
    characters. spelling: reserved id → these."""

    def __init__(self, spelling: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._spelling = {token: np.array(ids, np.int32) for token, ids in spelling.items()}
        self._is_reserved = np.zeros(vocab_size, np.bool_)
        self._is_reserved[list(spelling)] = True

    def __call__(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The ids of a text without reserved ones; the same array if it has none."""
        places = np.flatnonzero(self._is_reserved[ids]).tolist() if self._spelling else []
        parts, at = [], 0
        for place in places:
            parts += [ids[at:place], self._spelling[int(ids[place])]]
            at = place + 1
        return np.concatenate([*parts, ids[at:]]) if parts else ids
