"""tokenizer.json files and Hugging Face folders, against transformers and the tokenizers library themselves."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.text import IncrementalDetokenizer
from megatfm.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load,
    read_tokenizer_files,
    train_byte_bpe,
    train_sentencepiece,
)
from megatfm.tokenizers.base import SPACE_MARK
from megatfm.tokenizers.sentence_piece import make_tokenizer_json
from tests.support.text_objectives import LLAMA2_PIECES, ODD_TEXTS

transformers = pytest.importorskip("transformers")

FAMILIES = ("gpt2", "roberta", "bert", "t5", "llama2")
any_text = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(ODD_TEXTS)).map("".join)
File = dict[str, Any]
Pairs = dict[str, tuple[Tokenizer, Any]]


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, Any]]:
    """Ours and transformers', of each folder."""
    return {
        name: (load(folder), transformers.AutoTokenizer.from_pretrained(folder)) for name, folder in folders.items()
    }


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.extended] * (family == "gpt2")) for family in FAMILIES],  # as RoBERTa's
)
def test_real_text_has_transformers_ids(pairs: Pairs, family: str, texts: list[str]) -> None:
    actual, expected = pairs[family]
    for text in (*texts, *texts[0].splitlines(keepends=True)):
        ids = expected(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert actual.encode(text).tolist() == ids
        decoded = expected.decode(ids, clean_up_tokenization_spaces=False)
        assert actual.decode(ids) == decoded
        stream = IncrementalDetokenizer(actual)
        assert "".join(stream.add([token]) for token in ids) + stream.end() == decoded


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_odd_text_has_the_ids_of_transformers(pairs: Pairs, text: str) -> None:
    """But where a text spells a piece that unigram models can't tell from a reserved one: there ours spells on."""
    for family, (actual, reference) in pairs.items():
        ids = actual.encode(text)
        expected = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        reserved = actual.special.reserved - {actual.unk}
        assert family == "t5" or not set(expected) & reserved, family
        if not set(expected) & reserved:
            assert ids.tolist() == expected, family
        assert not set(ids.tolist()) & reserved, family
        if actual.lossless:
            assert actual.decode(ids) == text, family
            assert actual.byte_lengths()[ids].sum() == len(text.encode()), family


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_those_of_transformers(pairs: Pairs, family: str) -> None:
    actual, expected = pairs[family]
    roles = {role: getattr(expected, f"{role}_token_id") for role in ("bos", "eos", "pad", "mask", "cls", "sep")}
    fallbacks = {"bos": roles["cls"] or roles["eos"], "eos": roles["sep"], "pad": roles["eos"]}
    for role, token in roles.items():
        assert getattr(actual, role) == (fallbacks.get(role) if token is None else token), role
    assert actual.unk == (None if family == "gpt2" else expected.unk_token_id)
    assert set(expected.all_special_ids) == actual.special.reserved
    assert actual.vocab_size == len(expected)
    assert actual.lossless == (family in ("gpt2", "roberta"))


def test_sentinels_of_t5_descend(pairs: Pairs) -> None:
    actual, expected = pairs["t5"]
    assert actual.sentinels == tuple(range(actual.vocab_size - 1, actual.vocab_size - 101, -1))
    assert list(actual.sentinels[:2]) == expected.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"])


def test_ids_that_begin_a_word(pairs: Pairs, texts: list[str]) -> None:
    """Against the words that the tokenizers library counts: what is cut at white space."""
    small = pairs["t5"][0]  # it lacks some signs, and one unknown id may stand for several
    text = " ".join(word for word in texts[0].split() if small.unk not in small.encode(word))
    for family, (actual, expected) in pairs.items():
        starts = actual.word_starts()
        ids = actual.encode(text)
        assert starts is not None
        assert starts[sorted(actual.special.reserved)].all()
        if family == "bert":
            word_ids = expected(text, add_special_tokens=False).word_ids()
            assert starts[ids].tolist() == [a != b for a, b in zip([None, *word_ids], word_ids, strict=False)]
        else:
            words = [b for a, b in zip(" " + text, text, strict=False) if a == " "]
            assert starts[ids].sum() == len(words) - (family in ("gpt2", "roberta"))  # no mark before the first


def test_unigram_pieces_that_look_reserved_are_spelled_out(pairs: Pairs) -> None:
    actual, reference = pairs["t5"]
    for text in ("a</s>b", "<pad>", "<extra_id_3> x</s></s>"):
        expected: list[int] = []
        for token in reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]:
            spelled = reference.convert_tokens_to_ids(list(reference.convert_ids_to_tokens(token)))
            expected += spelled if token in actual.special.reserved - {actual.unk} else [token]
        assert actual.encode(text).tolist() == expected


@pytest.fixture(scope="module")
def plain(texts: list[str]) -> File:
    return json.loads(train_byte_bpe(texts, vocab_size=400, sentinels=2))


@pytest.fixture
def changed(plain: File) -> Callable[[Callable[[File], None]], HuggingFaceTokenizer]:
    """`changed(change)`: a tokenizer of the file after `change(file)`."""

    def make(change: Callable[[File], None], config: bytes | None = None) -> HuggingFaceTokenizer:
        file = json.loads(json.dumps(plain))
        change(file)
        return HuggingFaceTokenizer(json.dumps(file).encode(), config)

    return make


def nothing(file: File) -> None:
    pass


Changed = Callable[..., HuggingFaceTokenizer]


def test_truncation_padding_and_dropout_are_switched_off(changed: Changed) -> None:
    def change(file: File) -> None:
        file["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        file["padding"] = {
            "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
            "pad_type_id": 0, "pad_token": "<pad>",
        }  # fmt: skip
        file["model"]["dropout"] = 0.5

    text = "a long text is encoded whole, and always alike: " * 20
    expected = changed(nothing).encode(text).tolist()
    for _ in range(3):
        assert changed(change).encode(text).tolist() == expected


LOSES: dict[str, Callable[[File], None]] = {
    "normalises": lambda file: file.update(normalizer={"type": "NFC"}),
    "puts a space in front": lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
    "drops spaces": lambda file: file.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, file["pre_tokenizer"]]}
    ),
    "drops matches": lambda file: file.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False},
                              file["pre_tokenizer"]],
        }
    ),
    "lacks a byte": lambda file: file["model"]["vocab"].update(
        {"unreachable": file["model"]["vocab"].pop("Ā")}  # the byte 0
    ),
    "decodes otherwise": lambda file: file.update(decoder={"type": "Fuse"}),
    "an added token swallows spaces": lambda file: file["added_tokens"].append(added("x!", lstrip=True)),
    "an added token can't be decoded": lambda file: file["added_tokens"].append(added("é")),
}  # fmt: skip


def added(content: str, **settings: bool) -> File:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 400, "content": content, **defaults, **settings}


@pytest.mark.parametrize("way", LOSES)
def test_each_way_to_lose_text_is_noticed(changed: Changed, way: str) -> None:
    assert changed(nothing).lossless
    tokenizer = changed(LOSES[way])
    assert not tokenizer.lossless
    assert tokenizer.byte_lengths() is None
    stream, ids = IncrementalDetokenizer(tokenizer), tokenizer.encode("still decoded  x!é\0").tolist()
    assert stream.add(ids) + stream.end() == tokenizer.decode(ids)


def test_added_tokens_keep_their_bytes(changed: Changed) -> None:
    """Runs of spaces, as code models have them, are found in text before all else."""
    tokenizer = changed(lambda file: file["added_tokens"].append(added("    ")))
    text = "    if x:\n        y"
    ids = tokenizer.encode(text)
    assert 400 in ids
    assert tokenizer.lossless
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text)
    assert tokenizer.word_starts()[400]
    assert tokenizer.vocab_size == 401


CONFIG = {"eos_token": "<extra_1>", "bos_token": None, "mask_token": {"content": "<sep>", "special": True}}


def test_roles_of_the_config_go_before_names_and_into_the_hash(changed: Changed) -> None:
    alone, message = changed(nothing), changed(nothing, json.dumps(CONFIG).encode())
    assert message.id_to_piece(message.eos) == "<extra_1>"
    assert message.id_to_piece(message.mask) == "<sep>"
    assert message.bos == alone.bos
    assert message.hash != alone.hash
    same = {"eos_token": "</s>", "chat_template": "anything", "model_max_length": 5}
    assert changed(nothing, json.dumps(same).encode()).hash == alone.hash


def test_a_token_that_only_the_config_calls_special_is_special(changed: Changed) -> None:
    def change(file: File) -> None:
        file["added_tokens"] = [item for item in file["added_tokens"] if item["content"] != "<mask>"]

    assert changed(change).mask is None
    message = changed(change, b'{"mask_token": "<mask>"}')
    assert message.id_to_piece(message.mask) == "<mask>"
    assert message.mask not in message.encode("a <mask> b")


SPECIAL = {"content": "def", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
ROLES_ALONE = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("config", "names"), [
    ({"extra_special_tokens": ["def", "<new>"]}, None),
    ({"additional_special_tokens": ["def", "<new>"]}, None),
    ({"extra_special_tokens": ["def"], "additional_special_tokens": ["return"]}, None),
    ({}, {"additional_special_tokens": ["def", "<new>"], **ROLES_ALONE}),
    ({}, {"extra_special_tokens": [SPECIAL, "<new>"], "eos_token": "<extra_1>"}),
    ({"eos_token": "</s>"}, {"eos_token": "<extra_1>"}),
    ({"eos_token": "</s>"}, {"eos_token": {**SPECIAL, "content": "</s>"}}),
    ({"added_tokens_decoder": {}, **ROLES_ALONE}, {"eos_token": "<extra_1>"}),
    (None, {"additional_special_tokens": ["def"], **ROLES_ALONE}),
], ids=str)  # fmt: skip
def test_further_special_tokens_are_read_from_the_files_that_transformers_reads(
    config: dict[str, Any] | None, names: dict[str, Any] | None, plain: File, tmp_path: Path
) -> None:
    class_ = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": plain, "tokenizer_config.json": config and config | class_}
    files |= {"special_tokens_map.json": names}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    actual = load(tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert actual.vocab_size == len(reference)
    for word in ("def", "return", "<new>"):
        is_special = reference.convert_tokens_to_ids(word) in reference.all_special_ids
        assert actual.encode_with_offsets(word)[0].tolist() == reference.encode(word), word
        assert is_special == (word in actual.reserved_spellings), word
        assert actual.decode(actual.encode(word)) == word, "a text that spells it is no such token"
    if reference.eos_token is not None:
        assert actual.eos == reference.eos_token_id
    (tmp_path / "copy").mkdir()
    for name, data in read_tokenizer_files(tmp_path).items():
        (tmp_path / "copy" / name).write_bytes(data)
    copied = load(tmp_path / "copy")
    assert (copied.hash, copied.special) == (actual.hash, actual.special)


def test_words_that_end_with_a_mark_begin_nowhere(changed: Changed) -> None:
    """GPT-1's kind: whether a piece begins a word is told by the piece before it."""

    def change(file: File) -> None:
        file["pre_tokenizer"] = {"type": "Whitespace"}
        file["model"]["end_of_word_suffix"] = "</w>"

    tokenizer = changed(change)
    assert tokenizer.kind == "bpe"
    assert tokenizer.word_starts() is None


def test_half_a_surrogate_pair_is_refused_with_offsets_too(plain: File) -> None:
    tokenizer = HuggingFaceTokenizer(json.dumps(plain).encode())
    for encode in (tokenizer.encode_with_offsets, tokenizer.encode_text_with_offsets):
        with pytest.raises(MegatfmError, match="surrogates not allowed at character 3: it is not Unicode"):
            encode("abc\ud800")


@pytest.mark.parametrize(("data", "config", "message"), [
    (b"{}", None, "not a tokenizer.json of the tokenizers library"),
    (b"{", None, "not a tokenizer.json of the tokenizers library"),
    (None, b"[]", "tokenizer_config.json beside it is not valid"),
    (None, b"{", "tokenizer_config.json beside it is not valid"),
    (None, b'{"extra_special_tokens": "<x>", "pad_token": "<nowhere>"}', "beside it calls its pad_token"),
    (None, b'{"pad_token": "<nowhere>"}', "has no '<nowhere>', which tokenizer_config.json beside it calls"),
])  # fmt: skip
def test_broken_files_are_one_line(plain: File, data: bytes | None, config: bytes | None, message: str) -> None:
    with pytest.raises(UsageError, match=f"^x.json: .*{message}") as caught:
        HuggingFaceTokenizer(data or json.dumps(plain).encode(), config, "x.json")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ SentencePiece as a tokenizer.json


MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe"},
    "llama2": LLAMA2_PIECES,
    "llama2, one space": {**LLAMA2_PIECES, "remove_extra_whitespaces": True},
}


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-unigram", *MODELS])
def test_a_tokenizer_json_has_the_ids_of_a_sentencepiece_model(
    kind: str, foreign: Callable[..., bytes], model: bytes, texts: list[str]
) -> None:
    """Pieces of a unigram model may come in another order where the score is the same."""
    data, order = model if kind == "sentencepiece" else b"", list
    if kind == "sentencepiece-unigram":
        data, order = train_sentencepiece(texts, vocab_size=600, sentinels=8, model_type="unigram"), sorted
    data = data or foreign(**MODELS[kind])
    content = make_tokenizer_json(data)
    assert content is not None
    library, expected = tokenizers.Tokenizer.from_str(content.decode()), SentencePieceTokenizer(data)
    odd = [text for text in ODD_TEXTS if text != SPACE_MARK and not text.startswith("<")]
    for text in ("", *texts, *odd, *map("".join, itertools.pairwise(odd)), *(" " * n + "a" for n in range(40))):
        ids, actual = expected.encode(text).tolist(), library.encode(text).ids
        assert order(actual) == order(ids), text
        if expected.unk not in ids:
            assert library.decode(actual) == expected.decode(ids)
    assert library.encode("a</s>").ids[-1] == expected.eos


@pytest.mark.parametrize("settings", [
    {"model_type": "char", "vocab_size": 80, "hard_vocab_limit": False}, {"treat_whitespace_as_suffix": True},
    {"user_defined_symbols": ["ab"]},
], ids=str)  # fmt: skip
def test_no_tokenizer_json_is_made_of_what_the_library_lacks(
    settings: dict[str, Any], foreign: Callable[..., bytes]
) -> None:
    assert make_tokenizer_json(foreign(**settings)) is None
