"""SentencePiece models, our own and those of others, against SentencePiece itself."""

from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.errors import UsageError
from megatfm.inference.detokenizer import IncrementalDetokenizer
from megatfm.tokenizers import SentencePieceTokenizer
from tests.support.tokenizer_cases import LLAMA2_PIECES, ODD_TEXTS, T5_PIECES

Foreign = Callable[..., bytes]
characters = st.characters(exclude_categories=["Cs"])
KINDS = {
    "t5": T5_PIECES,
    "llama2": LLAMA2_PIECES,
    "no byte fallback": {"model_type": "bpe"},
    "spaces as suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True},
    "characters": {"model_type": "char", "vocab_size": 80, "hard_vocab_limit": False},
}


@settings(max_examples=100, deadline=None)
@given(text=st.text(characters.filter(lambda character: character != "\u2581")))
def test_ids_are_those_of_sentencepiece(tokenizer: SentencePieceTokenizer, model: bytes, text: str) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode(text).tolist() == plain.encode(text)


def test_what_our_own_says_of_itself(tokenizer: SentencePieceTokenizer) -> None:
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


def test_what_others_can_not_promise_is_not_promised(other: tuple[str, bytes]) -> None:
    tokenizer = SentencePieceTokenizer(other[1])
    assert not tokenizer.lossless
    assert tokenizer.describe()["lossless"] is False
    assert tokenizer.byte_lengths() is None
    assert tokenizer.token_bytes() is None
    assert (tokenizer.word_starts() is None) == (other[0] == "spaces as suffix")
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep, tokenizer.sentinels, tokenizer.modes) == (
        None,
        None,
        None,
        (),
        {},
    )


LOSSY = {
    "normalization_rule_name": "nfkc",
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": True,
    "byte_fallback": False,
}


@pytest.mark.parametrize("setting", LOSSY)
def test_each_way_to_lose_text_is_noticed(foreign: Foreign, setting: str) -> None:
    keeps: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 700,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
    }
    assert SentencePieceTokenizer(foreign(**keeps)).lossless
    assert not SentencePieceTokenizer(foreign(**keeps | {setting: LOSSY[setting]})).lossless


def test_roles_are_found_among_control_and_user_defined_pieces(foreign: Foreign) -> None:
    """ALBERT's and XLNet's files name their tokens so; user-defined ones would be found in text."""
    model = foreign(
        **T5_PIECES,
        control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]", "<extra_id_1>", "<extra_id_0>"],
    )
    tokenizer = SentencePieceTokenizer(model)
    pieces = {tokenizer.id_to_piece(token): token for token in range(tokenizer.vocab_size)}
    assert (tokenizer.cls, tokenizer.sep, tokenizer.mask) == tuple(
        pieces[name] for name in ("[CLS]", "[SEP]", "[MASK]")
    )
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
    from megatfm.tokenizers.sentence_piece import _read_settings

    for settings_ in (*KINDS.values(), {"user_defined_symbols": ["[MASK]", "ü"]}):
        model = foreign(**settings_)
        trainer, normalizer = proto.FromString(model).trainer_spec, proto.FromString(model).normalizer_spec
        settings = _read_settings(model)
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
def test_what_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"^x\.model: "):
        SentencePieceTokenizer(content, "x.model")
