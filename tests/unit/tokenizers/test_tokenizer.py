"""Encoding and decoding, against SentencePiece itself and over arbitrary Unicode."""

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import SentencePieceTokenizer, load

# What SentencePiece treats in a special way: its space, unknown and boundary marks, its names of special pieces.
SPECIAL = [
    "\ue009",
    "\ue020",
    "\u2581",
    "\u2585",
    "\u2047",
    "\t",
    "\0",
    "\r",
    " ",
    "  ",
    "\n",
    "<s>",
    "<unk>",
    "<mask>",
    "<0x41>",
    "\ufeff",
]
characters = st.characters(exclude_categories=["Cs"])
any_text = st.lists(st.text(characters) | st.sampled_from(SPECIAL)).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=any_text)
def test_decoding_gives_back_any_text(tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & reserved(tokenizer)


@settings(max_examples=100, deadline=None)
@given(text=st.text(characters.filter(lambda character: character != "\u2581")))
def test_ids_are_those_of_sentencepiece(tokenizer: SentencePieceTokenizer, model: bytes, text: str) -> None:
    assert tokenizer.encode(text).tolist() == sentencepiece.SentencePieceProcessor(model_proto=model).encode(
        text
    )


def test_every_assigned_character_alone(tokenizer: SentencePieceTokenizer) -> None:
    everything = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert tokenizer.decode(tokenizer.encode(everything)) == everything


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_batch_gives_the_ids_of_each_text(
    tokenizer: SentencePieceTokenizer, texts: list[str], threads: int
) -> None:
    batch = [*texts, "", "\u2581", "a\u2581\u2581b\u2581", "end"]
    encoded = tokenizer.encode_batch(batch, threads)
    assert len(encoded) == len(batch)
    for text, ids in zip(batch, encoded, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.encode_batch([], threads) == []


def test_ids_can_be_written_to(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.encode("some text").flags.writeable


def test_reserved_ids_decode_to_nothing(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("text").tolist()
    silent = sorted(reserved(tokenizer) - {tokenizer.unk})
    assert tokenizer.decode([*silent, *ids, *silent]) == "text"
    assert tokenizer.decode([tokenizer.unk]) == "\ufffd"


def test_half_a_character_becomes_a_replacement_character(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("\U0010ffff")
    assert set(tokenizer.decode(ids[:2])) == {"\ufffd"}


def test_what_it_says_of_itself(tokenizer: SentencePieceTokenizer) -> None:
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2, 3)
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep) == (4, 5, 6)
    assert tokenizer.sentinels == tuple(range(7, 15))
    assert [tokenizer.piece(token) for token in (4, 7, 14)] == ["<mask>", "<extra_0>", "<extra_7>"]
    assert tokenizer.vocab_size == 900
    assert tokenizer.token_dtype == "uint16"
    assert tokenizer.describe()["blake3"] == tokenizer.hash


def test_half_a_surrogate_pair_is_refused(tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(MegatfmError, match="character 3: it is not Unicode"):
        tokenizer.encode("abc\ud800")


@pytest.mark.parametrize("token", [-1, 900])
def test_an_id_beyond_the_vocabulary_is_refused(tokenizer: SentencePieceTokenizer, token: int) -> None:
    with pytest.raises(MegatfmError, match=f"id {token} is not in this tokenizer's vocabulary of 900"):
        tokenizer.decode([20, token])


def test_load_reads_the_model(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    assert load(path).hash == SentencePieceTokenizer(model).hash


@pytest.mark.parametrize("content", [None, b"", b"no model", b"\x0a\x03abc"])
def test_load_refuses_what_is_no_model(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.model: .*"):
        load(path)


def reserved(tokenizer: SentencePieceTokenizer) -> set[int]:
    return set(range(7)) | set(tokenizer.sentinels)
