"""Roles of special tokens, by the names that the field uses."""

import pytest

from megatfm.errors import UsageError
from megatfm.tokenizers.base import find_special_tokens, reserved_names, special_token_names


def ids(text: str) -> dict[str, int]:
    return {name: token for token, name in enumerate(text.split())}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("<s> </s> <pad> <unk>", {"bos": 0, "eos": 1, "pad": 2, "unk": 3}),
        ("[PAD] [UNK] [CLS] [SEP] [MASK]", {"bos": 2, "eos": 3, "pad": 0, "cls": 2, "sep": 3, "mask": 4}),
        ("<|endoftext|>", {"bos": 0, "eos": 0, "pad": 0, "unk": None}),
        ("<pad> </s> <unk>", {"bos": 1, "eos": 1, "pad": 0, "unk": 2}),  # T5
        (
            "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|>",
            {"bos": 0, "eos": 1, "pad": 1, "unused": (2,)},  # Llama 3
        ),
        ("<pad> <eos> <bos> <unk>", {"bos": 2, "eos": 1, "pad": 0}),  # Gemma
        ("</s> <extra_id_2> <extra_id_1> <extra_id_0>", {"sentinels": (3, 2, 1), "unused": ()}),
        ("</s> ▁<extra_id_1> ▁<extra_id_0>", {"sentinels": (2, 1)}),  # mT5
        ("</s> <extra_0> <extra_2>", {"sentinels": (1,), "unused": (2,)}),  # without 1, 2 can't be reached
        ("</s> [S2S] [NLU] [NLG]", {"modes": {"R": 2, "S": 1, "X": 3}}),  # UL2
        ("</s> <R> <S> <X>", {"modes": {"R": 1, "S": 2, "X": 3}}),
        ("</s> [R] [X]", {"modes": {}, "unused": (1, 2)}),
    ],
)
def test_roles_by_name(tokens: str, expected: dict[str, object]) -> None:
    special_tokens = find_special_tokens(ids(tokens), {}, "x")
    assert {name: getattr(special_tokens, name) for name in expected} == expected
    assert special_tokens.reserved == set(range(len(tokens.split())))


def test_what_the_file_says_goes_before_usual_names() -> None:
    special_tokens = find_special_tokens(
        ids("<s> </s> <stop> <blank>"), {"eos": "<stop>", "mask": "<blank>"}, "x"
    )
    assert (special_tokens.bos, special_tokens.eos, special_tokens.mask, special_tokens.unused) == (
        0,
        2,
        3,
        (1,),
    )


def test_a_token_that_ends_texts_is_not_unknown() -> None:
    assert (
        find_special_tokens(ids("<|endoftext|>"), {"unk": "<|endoftext|>", "eos": "<|endoftext|>"}, "x").unk
        is None
    )


@pytest.mark.parametrize("tokens", ["", "<unk> <pad> <mask>"])
def test_nothing_to_end_a_text_with_is_an_error(tokens: str) -> None:
    with pytest.raises(UsageError, match="x: no special token that could end a text"):
        find_special_tokens(ids(tokens), {}, "x")


def test_names_of_our_own() -> None:
    actual = "<s> </s> <pad> <mask> <cls> <sep> <extra_0> <extra_1> <R> <S> <X>"
    assert " ".join(reserved_names(2, True)) == actual
    assert reserved_names(0, False, without=("bos", "eos", "pad")) == ["<mask>", "<cls>", "<sep>"]
    special_tokens = find_special_tokens({name: n for n, name in enumerate(reserved_names(2, True))}, {}, "x")
    assert special_tokens.unused == ()


def test_candidates_are_what_could_be_reserved() -> None:
    assert special_token_names(["a", "<s>", "<extra_id_7>", "▁<extra_3>", "<extra_>", "[NLU]", "<0x00>"]) == [
        "<s>",
        "<extra_id_7>",
        "▁<extra_3>",
        "[NLU]",
    ]
