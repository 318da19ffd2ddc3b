"""Properties of every kind of tokenizer, and SentencePiece models against SentencePiece itself."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.text import IncrementalDetokenizer
from megatfm.tokenizers import SentencePieceTokenizer, Tokenizer
from tests.support.text_objectives import LLAMA2_PIECES, LOSSLESS_KINDS, ODD_TEXTS, OWN_KINDS, T5_PIECES

characters = st.characters(exclude_categories=["Cs"])
any_text = st.lists(st.text(characters) | st.sampled_from(ODD_TEXTS)).map("".join)
Own = dict[str, Tokenizer]
VOCAB_SIZE = 900
"""Size of each tokenizer in `trained`."""


@pytest.fixture(scope="module")
def byte_lengths(trained: Own) -> dict[str, np.ndarray]:
    """Bytes of each id of the kinds that lose nothing."""
    return {kind: trained[kind].byte_lengths() for kind in LOSSLESS_KINDS}


@settings(max_examples=80, deadline=None)
@given(text=any_text)
def test_any_text_comes_back_and_makes_no_reserved_id(
    trained: Own, byte_lengths: dict[str, np.ndarray], text: str
) -> None:
    for kind, tokenizer in trained.items():
        ids = tokenizer.encode(text)
        unknown = {tokenizer.unk} if kind == "wordpiece" else set()
        assert not set(ids.tolist()) & (tokenizer.special.reserved - unknown), kind
        assert tokenizer.lossless == (kind in LOSSLESS_KINDS)
        if tokenizer.lossless:
            assert tokenizer.decode(ids) == text, kind
            assert byte_lengths[kind][ids].sum() == len(text.encode()), kind


@pytest.mark.parametrize("kind", LOSSLESS_KINDS)
def test_characters_of_all_planes(trained: Own, kind: str) -> None:
    selected = (*range(0x3000), *range(0x3000, 0x110000, 17))
    everything = "".join(chr(code) for code in selected if not 0xD800 <= code < 0xE000)
    assert trained[kind].decode(trained[kind].encode(everything)) == everything


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_names_of_reserved_ids_make_none_of_them(trained: Own, kind: str) -> None:
    tokenizer = trained[kind]
    reserved = sorted(tokenizer.special.reserved - {tokenizer.unk})
    spelled = " ".join(tokenizer.id_to_piece(token) for token in reserved)
    ids = tokenizer.encode(spelled)
    assert not set(ids.tolist()) & set(reserved)
    assert "".join(tokenizer.decode(ids).split()) == "".join(spelled.split()).lower() or tokenizer.lossless


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_reserved_ids_are_where_they_are_said_to_be(trained: Own, kind: str) -> None:
    tokenizer = trained[kind]
    names = {"sentencepiece": ("<s>", "</s>", "<pad>", "<mask>", "<cls>", "<sep>")}
    names["wordpiece"] = ("<s>", "</s>", "[PAD]", "[MASK]", "[CLS]", "[SEP]")
    roles = ("bos", "eos", "pad", "mask", "cls", "sep")
    for role, name in zip(roles, names.get(kind, names["sentencepiece"]), strict=True):
        assert tokenizer.id_to_piece(getattr(tokenizer, role)) == name
    assert [tokenizer.id_to_piece(token) for token in tokenizer.sentinels] == [f"<extra_{n}>" for n in range(8)]
    modes = {} if kind == "sentencepiece" else {"R": "<R>", "S": "<S>", "X": "<X>"}
    assert {letter: tokenizer.id_to_piece(token) for letter, token in tokenizer.modes.items()} == modes
    assert tokenizer.special.unused == ()
    has_unknown = kind not in ("byte-bpe", "llama3")
    assert (tokenizer.unk is not None) == has_unknown
    assert len(tokenizer.special.reserved) == 6 + 8 + len(modes) + has_unknown


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_reserved_ids_decode_to_nothing(trained: Own, kind: str) -> None:
    tokenizer = trained[kind]
    ids = tokenizer.encode("text").tolist()
    silent = sorted(tokenizer.special.reserved - {tokenizer.unk})
    assert tokenizer.decode([*silent, *ids, *silent]) == "text"
    if tokenizer.lossless:
        reserved = sorted(tokenizer.special.reserved)
        assert tokenizer.byte_lengths()[reserved].tolist() == [0] * len(reserved)


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_batch_gives_the_ids_of_each_text(trained: Own, kind: str, threads: int, texts: list[str]) -> None:
    tokenizer, batch = trained[kind], [*texts, *ODD_TEXTS, "", "a\u2581\u2581b\u2581", "end"]
    encoded = tokenizer.encode_batch(batch, threads)
    assert len(encoded) == len(batch)
    for text, ids in zip(batch, encoded, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert ids.dtype == np.int32
        assert ids.flags.writeable
    assert tokenizer.encode_batch([], threads) == []
    with pytest.raises(MegatfmError, match="character 3: it is not Unicode"):
        tokenizer.encode_batch([*texts, "abc\ud800"], threads)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_an_id_beyond_the_vocabulary_has_no_piece(trained: Own, kind: str) -> None:
    pieces = [trained[kind].id_to_piece(token) for token in (VOCAB_SIZE - 1, VOCAB_SIZE, 2**31)]
    assert pieces[0]
    assert pieces[1:] == ["", ""]


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_an_id_beyond_the_vocabulary_is_refused(trained: Own, kind: str, token: int) -> None:
    with pytest.raises(MegatfmError, match=f"id {token} is not in this tokenizer's vocabulary of {VOCAB_SIZE}"):
        trained[kind].decode([20, token])


@settings(max_examples=60, deadline=None)
@given(text=any_text, cuts=st.lists(st.integers(1, 5), max_size=5))
def test_streamed_text_is_decoded_text(trained: Own, text: str, cuts: list[int]) -> None:
    """In whatever portions ids come, no portion holds half a character."""
    for kind, tokenizer in trained.items():
        ids = tokenizer.encode(text).tolist()
        decoded = tokenizer.decode(ids)
        stream, displayed = IncrementalDetokenizer(tokenizer), ""
        for size in [*cuts, len(ids)]:
            displayed += stream.add(ids[:size])
            ids = ids[size:]
            assert decoded.startswith(displayed), kind
        assert displayed + stream.end() == decoded, kind


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_streamed_ids_of_a_model_are_decoded_too(trained: Own, ids: list[int]) -> None:
    """Any ids, as a model may sample: broken characters and unknown ids among them."""
    for kind, tokenizer in trained.items():
        visible_ids = [token for token in ids if token not in tokenizer.special.reserved or token == tokenizer.unk]
        stream = IncrementalDetokenizer(tokenizer)
        assert marked(stream.add(visible_ids) + stream.end()) == marked(tokenizer.decode(visible_ids)), kind


def marked(text: str) -> str:
    """Libraries differ in how many marks they give for several broken bytes."""
    return re.sub("\ufffd+", "\ufffd", text)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_a_continuation_is_decoded_as_part_of_its_text(trained: Own, kind: str, texts: list[str]) -> None:
    """Its first id may go on with the last word of the prompt, or stand apart from it."""
    tokenizer = trained[kind]
    ids = tokenizer.encode(texts[0][:300]).tolist()
    for split in range(len(ids)):
        before = tokenizer.decode(ids[:split])
        stream = IncrementalDetokenizer(tokenizer, prompt_ids=[tokenizer.bos, *ids[:split]])
        assert before + stream.add(ids[split:]) + stream.end() == tokenizer.decode(ids)


WORDS = {
    "sentencepiece": ["▁the", "x", "\n"],
    "sentencepiece-unigram": ["▁the", "x", "\n"],
    "byte-bpe": ["Ġthe", "x", "Ċ"],
    "llama3": ["Ġthe", "x", "Ċ"],
    "wordpiece": ["the", "##e", None],
}


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_ids_that_begin_a_word(trained: Own, kind: str) -> None:
    tokenizer = trained[kind]
    starts = tokenizer.word_starts()
    assert starts is not None
    assert starts.shape == (tokenizer.vocab_size,)
    pieces = [tokenizer.id_to_piece(token) for token in range(tokenizer.vocab_size)]
    begins, goes_on, breaks = WORDS[kind]
    assert starts[pieces.index(begins)]
    assert not starts[pieces.index(goes_on)]
    if breaks in pieces:
        assert starts[pieces.index(breaks)]
    assert starts[sorted(tokenizer.special.reserved)].all()
    text = "we are in the middle of useful information"
    actual = [text_of(tokenizer, word) for word in words(tokenizer, " " + text)]
    assert actual == text.split()


def words(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    ids, starts = tokenizer.encode(text).tolist(), tokenizer.word_starts()
    bounds = [n for n, token in enumerate(ids) if starts[token]] + [len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids).strip()


def test_facts_are_plain_json(trained: Own) -> None:
    for kind, tokenizer in trained.items():
        facts = json.loads(json.dumps(tokenizer.describe()))
        assert facts["kind"] == ("byte-bpe" if kind == "llama3" else kind)
        assert facts["blake3"] == tokenizer.hash
        assert facts.get("lossless", True) == tokenizer.lossless == (kind != "wordpiece")
        assert (tokenizer.byte_lengths() is None) == (kind == "wordpiece")


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_shards_store_ids_in_the_smallest_type(
    tokenizer: Tokenizer, size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "vocab_size", size)
    assert tokenizer.token_dtype == dtype


# ---------------------------------------------------------------------------------------------- SentencePiece


Foreign = Callable[..., bytes]
KINDS = {
    "t5": T5_PIECES,
    "llama2": LLAMA2_PIECES,
    "no byte fallback": {"model_type": "bpe"},
    "spaces as suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "characters": {"model_type": "char", "vocab_size": 80, "hard_vocab_limit": False},
}


@settings(max_examples=60, deadline=None)
@given(text=st.text(characters.filter(lambda character: character != "\u2581")))
def test_ids_are_those_of_sentencepiece(tokenizer: SentencePieceTokenizer, model: bytes, text: str) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode(text).tolist() == plain.encode(text)


def test_our_tokenizers_store_their_special_tokens(tokenizer: SentencePieceTokenizer) -> None:
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2, 3)
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep) == (4, 5, 6)
    assert tokenizer.sentinels == tuple(range(7, 15))
    assert [tokenizer.id_to_piece(token) for token in (4, 7, 14)] == ["<mask>", "<extra_0>", "<extra_7>"]
    assert tokenizer.vocab_size == 900
    # As it stands beside corpora that were prepared long ago.
    assert list(tokenizer.describe()) == ["kind", "blake3", "vocab_size", "reserved", "sentinels"]
    assert tokenizer.decode([tokenizer.unk]) == "\ufffd"


def test_half_a_character_becomes_a_replacement_character(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("\U0010ffff")
    assert set(tokenizer.decode(ids[:2])) == {"\ufffd"}


@pytest.fixture(scope="module", params=KINDS)
def other(request: pytest.FixtureRequest, foreign: Foreign) -> tuple[str, bytes]:
    return request.param, foreign(**KINDS[request.param])


def test_models_of_others_are_read_as_they_are(other: tuple[str, bytes], texts: list[str]) -> None:
    _, model = other
    tokenizer, plain = SentencePieceTokenizer(model), sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in (*(text[:3000] for text in texts), *ODD_TEXTS, "  two  spaces ", ""):
        ids = plain.encode(text)
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == plain.decode(ids)
        stream = IncrementalDetokenizer(tokenizer)
        assert "".join(stream.add([token]) for token in ids) + stream.end() == plain.decode(ids)
    assert (tokenizer.unk, tokenizer.eos) == (plain.unk_id(), plain.eos_id())
    assert tokenizer.bos == (plain.bos_id() if plain.bos_id() >= 0 else plain.eos_id())
    assert tokenizer.pad == (plain.pad_id() if plain.pad_id() >= 0 else plain.eos_id())


def test_foreign_tokenizers_do_not_promise_to_be_lossless(other: tuple[str, bytes]) -> None:
    tokenizer = SentencePieceTokenizer(other[1])
    assert not tokenizer.lossless
    assert tokenizer.describe()["lossless"] is False
    assert tokenizer.byte_lengths() is None
    assert tokenizer.token_bytes() is None
    assert (tokenizer.word_starts() is None) == (other[0] == "spaces as suffix")
    facts = tokenizer.mask, tokenizer.cls, tokenizer.sep, tokenizer.sentinels, tokenizer.modes
    assert facts == (None, None, None, (), {})


LOSSY = {
    "normalization_rule_name": "nfkc",
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": True,
    "byte_fallback": False,
}


@pytest.mark.parametrize("setting", LOSSY)
def test_each_way_to_lose_text_is_noticed(foreign: Foreign, setting: str) -> None:
    keeps: dict[str, Any] = {
        "model_type": "bpe", "vocab_size": 700, "normalization_rule_name": "identity", "add_dummy_prefix": False,
        "remove_extra_whitespaces": False, "byte_fallback": True,
    }  # fmt: skip
    assert SentencePieceTokenizer(foreign(**keeps)).lossless
    assert not SentencePieceTokenizer(foreign(**keeps | {setting: LOSSY[setting]})).lossless


def test_roles_are_found_among_control_and_user_defined_pieces(foreign: Foreign) -> None:
    """ALBERT's and XLNet's files name their tokens so; user-defined ones would be found in text."""
    model = foreign(
        **T5_PIECES, control_symbols=["[CLS]", "[SEP]"], user_defined_symbols=["[MASK]", "<extra_id_1>", "<extra_id_0>"]
    )
    tokenizer = SentencePieceTokenizer(model)
    pieces = {tokenizer.id_to_piece(token): token for token in range(tokenizer.vocab_size)}
    actual = [tokenizer.cls, tokenizer.sep, tokenizer.mask]
    assert actual == [pieces[name] for name in ("[CLS]", "[SEP]", "[MASK]")]
    assert tokenizer.sentinels == (pieces["<extra_id_0>"], pieces["<extra_id_1>"])
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    defined = {tokenizer.mask, *tokenizer.sentinels}
    for text in ("a [MASK] b", "[MASK]", "x<extra_id_0>[MASK]</s>[CLS]", *ODD_TEXTS):
        expected: list[int] = []
        for token in plain.encode(text):
            spelled = [plain.piece_to_id(item) for item in plain.id_to_piece(token)]
            expected += spelled if token in defined else [token]
        assert tokenizer.encode(text).tolist() == expected
        assert not set(expected) & (tokenizer.special.reserved - {tokenizer.unk})
    assert defined & set(plain.encode("a [MASK] b"))


def test_settings_are_read_as_the_protobuf_library_reads_them(foreign: Foreign) -> None:
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", exc_type=Exception).ModelProto
    from megatfm.tokenizers.sentence_piece import read_settings

    for settings_ in (*KINDS.values(), {"user_defined_symbols": ["[MASK]", "ü"]}):
        model = foreign(**settings_)
        trainer, normalizer = proto.FromString(model).trainer_spec, proto.FromString(model).normalizer_spec
        settings = read_settings(model)
        assert settings["model_type"] == trainer.model_type
        assert settings["treat_whitespace_as_suffix"] == trainer.treat_whitespace_as_suffix
        assert settings["user_defined_symbols"] == list(trainer.user_defined_symbols)
        changes = normalizer.precompiled_charsmap or normalizer.add_dummy_prefix
        changes = changes or normalizer.remove_extra_whitespaces or trainer.treat_whitespace_as_suffix
        assert settings["changes_text"] == bool(changes or not normalizer.escape_whitespaces)


def test_a_model_without_an_end_is_refused(foreign: Foreign) -> None:
    model = foreign(model_type="bpe", bos_id=-1, eos_id=-1)
    with pytest.raises(UsageError, match=r"x\.model: no special token that could end a text"):
        SentencePieceTokenizer(model, "x.model")


@pytest.mark.parametrize("content", [b"", b"no model", b"\x0a\x03abc"])
def test_files_that_are_no_tokenizer_are_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"^x\.model: "):
        SentencePieceTokenizer(content, "x.model")
