"""Reserved ids: which token plays which role, found by the names that the field uses."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatfm.errors import UsageError

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
_SENTINEL = re.compile(r"<extra_(?:id_)?(\d+)>")  # ours, T5's
# SentencePiece may show a piece of its own with the mark of a space before it, as mT5's sentinels have.
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class Special:
    """Ids that never come from text. `others` are reserved, too, for something that megatfm has no use for."""

    bos: int
    eos: int
    pad: int
    unk: int | None = None
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: tuple[int, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    others: tuple[int, ...] = ()

    @property
    def reserved(self) -> frozenset[int]:
        """All of them."""
        roles = {getattr(self, role) for role in ROLES} - {None}
        return frozenset([*roles, *self.sentinels, *self.modes.values(), *self.others])


def reserved_names(sentinels: int, modes: bool, without: tuple[str, ...] = ()) -> list[str]:
    """What our own trainings reserve besides <unk>, in the order of the ids."""
    roles = [usual[0] for role, usual in ROLES.items() if role not in ("unk", *without)]
    mode_names = [usual[0] for usual in MODES.values()] if modes else []
    return [*roles, *(SENTINEL.format(number) for number in range(sentinels)), *mode_names]


def find_special_tokens(tokens: Mapping[str, int], named: Mapping[str, str], where: str) -> Special:
    """The roles of a file's special tokens (text → id); `named` says for some roles which token has them.

    A role without a token of its own goes to the one that does its work elsewhere: documents begin with `cls` or `eos`
    and end with `sep` or `bos`, as BERT's and GPT-2's do, and `eos` pads. Raises UsageError if nothing can end a text.
    """
    roles = {role: _first_present(tokens, (named.get(role, ""), *usual)) for role, usual in ROLES.items()}
    bos, eos = roles["bos"], roles["eos"]
    bos = _first_known(bos, roles["cls"], eos)
    eos = _first_known(eos, roles["sep"], bos)
    if bos is None or eos is None:
        raise UsageError(
            f"{where}: no special token that could end a text, such as </s>, <|endoftext|> or [SEP]: give a tokenizer "
            "that has one, or train one with `megatfm prep`"
        )
    pad = _first_known(roles["pad"], eos)
    assert pad is not None
    # GPT-2's <|endoftext|> is called its unknown token as well, though it has none.
    unk = roles["unk"] if roles["unk"] not in (bos, eos) else None
    found = Special(
        bos, eos, pad, unk, roles["mask"], roles["cls"], roles["sep"], _sentinels(tokens), _modes(tokens)
    )
    others = tuple(sorted(set(tokens.values()) - found.reserved))
    return Special(**{**vars(found), "others": others})


def special_token_names(pieces: Iterator[str] | list[str]) -> list[str]:
    """Pieces of a file that have the name of a role, a mode or a sentinel."""
    usual = {name for group in (*ROLES.values(), *MODES.values()) for name in group}
    return [p for p in pieces if p in usual or _SENTINEL.fullmatch(p.removeprefix(_SPACE_MARK))]


def _first_present(tokens: Mapping[str, int], wanted: tuple[str, ...]) -> int | None:
    return next((tokens[name] for name in wanted if name in tokens), None)


def _first_known(*found: int | None) -> int | None:
    return next((token for token in found if token is not None), None)


def _sentinels(tokens: Mapping[str, int]) -> tuple[int, ...]:
    """In the order of their numbers: T5's ids descend from <extra_id_0>, the last of its vocabulary."""
    numbered = {}
    for name, token in tokens.items():
        if match := _SENTINEL.fullmatch(name.removeprefix(_SPACE_MARK)):
            numbered[int(match[1])] = token
    result: list[int] = []
    while len(result) in numbered:
        result.append(numbered[len(result)])
    return tuple(result)


def _modes(tokens: Mapping[str, int]) -> dict[str, int]:
    """All three, or none."""
    found = {letter: _first_present(tokens, usual) for letter, usual in MODES.items()}
    named = {letter: token for letter, token in found.items() if token is not None}
    return named if len(named) == len(MODES) else {}
