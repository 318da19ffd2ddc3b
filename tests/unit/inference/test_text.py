"""Text that is decoded while it comes is the text that is decoded at the end."""

import pytest

from megatfm.inference.detokenizer import IncrementalDetokenizer
from megatfm.tokenizers import SentencePieceTokenizer, Tokenizer

TEXTS = [
    "def f(x):\n\treturn x  # Größe",
    "東京 🗼 ▁ naïve",
    "\u2581\U0001f469\u200d\U0001f680",
    "<0x41> <s>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_model: bytes) -> Tokenizer:
    return SentencePieceTokenizer(tokenizer_model)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids, stream = tokenizer.encode(text), IncrementalDetokenizer(tokenizer)
    pieces = [stream.add([token]) for token in ids]
    assert "".join(pieces) == text
    assert stream.end() == ""


def test_no_half_character_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🗼")
    assert len(ids) == 4, "this one must come in bytes for the test to say anything"
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.add([token]) for token in ids] == ["", "", "", "🗼"]
    stream.add(ids[:2])
    assert stream.end() == "\ufffd"


def test_broken_bytes_become_marks_and_reserved_ids_nothing(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("🗼")[0]
    after = tokenizer.encode("x")
    reserved = [tokenizer.bos, tokenizer.pad, tokenizer.mask, *tokenizer.sentinels]
    assert IncrementalDetokenizer(tokenizer).add([*after, *reserved, first, *after]) == "x\ufffdx"
    assert IncrementalDetokenizer(tokenizer).add([tokenizer.unk]) == "\ufffd"
