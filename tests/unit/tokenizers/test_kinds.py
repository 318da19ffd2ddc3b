"""What holds for every kind of tokenizer that can be trained here."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.errors import MegatfmError
from megatfm.inference.detokenizer import IncrementalDetokenizer
from megatfm.tokenizers import Tokenizer
from tests.support.tokenizer_cases import LOSSLESS_KINDS, ODD_TEXTS, OWN_KINDS

characters = st.characters(exclude_categories=["Cs"])
any_text = st.lists(st.text(characters) | st.sampled_from(ODD_TEXTS)).map("".join)
Own = dict[str, Tokenizer]


@pytest.mark.parametrize("kind", LOSSLESS_KINDS)
@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_decoding_gives_back_any_text(trained: Own, kind: str, text: str) -> None:
    tokenizer = trained[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.lossless
    assert tokenizer.decode(ids) == text
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    assert lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", LOSSLESS_KINDS)
def test_characters_of_all_planes(trained: Own, kind: str) -> None:
    selected = (*range(0x3000), *range(0x3000, 0x110000, 17))
    everything = "".join(chr(code) for code in selected if not 0xD800 <= code < 0xE000)
    assert trained[kind].decode(trained[kind].encode(everything)) == everything


@pytest.mark.parametrize("kind", OWN_KINDS)
@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_reserved_ids_never_come_from_text(trained: Own, kind: str, text: str) -> None:
    tokenizer = trained[kind]
    unknown = {tokenizer.unk} if kind == "wordpiece" else set()
    assert not set(tokenizer.encode(text).tolist()) & (tokenizer.special.reserved - unknown)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_not_even_where_text_spells_their_names(trained: Own, kind: str) -> None:
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
    assert [tokenizer.id_to_piece(token) for token in tokenizer.sentinels] == [
        f"<extra_{n}>" for n in range(8)
    ]
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
        assert tokenizer.byte_lengths()[sorted(tokenizer.special.reserved)].tolist() == [0] * len(
            tokenizer.special.reserved
        )


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
@pytest.mark.parametrize("token", [-1, 900])
def test_an_id_beyond_the_vocabulary_is_refused(trained: Own, kind: str, token: int) -> None:
    with pytest.raises(MegatfmError, match=f"id {token} is not in this tokenizer's vocabulary of 900"):
        trained[kind].decode([20, token])


@pytest.mark.parametrize("kind", OWN_KINDS)
@settings(max_examples=100, deadline=None)
@given(text=any_text, cuts=st.lists(st.integers(1, 5), max_size=5))
def test_streamed_text_is_decoded_text(trained: Own, kind: str, text: str, cuts: list[int]) -> None:
    """In whatever portions ids come, no portion holds half a character."""
    tokenizer = trained[kind]
    ids = tokenizer.encode(text).tolist()
    stream, displayed = IncrementalDetokenizer(tokenizer), ""
    for size in [*cuts, len(ids)]:
        displayed += stream.add(ids[:size])
        ids = ids[size:]
        assert tokenizer.decode(tokenizer.encode(text)).startswith(displayed)
    assert displayed + stream.end() == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("kind", OWN_KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streamed_ids_of_a_model_are_decoded_too(trained: Own, kind: str, data: st.DataObject) -> None:
    """Any ids, as a model may sample: broken characters, unknown and reserved ids among them."""
    tokenizer = trained[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    ids = [token for token in ids if token not in tokenizer.special.reserved or token == tokenizer.unk]
    stream = IncrementalDetokenizer(tokenizer)
    assert marked(stream.add(ids) + stream.end()) == marked(tokenizer.decode(ids))


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
    "sentencepiece": ["▁we", "x", "\n"],
    "sentencepiece-unigram": ["▁we", "x", "\n"],
    "byte-bpe": ["Ġwe", "x", "Ċ"],
    "llama3": ["Ġwe", "x", "Ċ"],
    "wordpiece": ["we", "##e", None],
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
