"""Texts and options that tokenizers are tried with."""

from collections.abc import Callable

import pytest

from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

# What one or another tokenizer treats in a special way: marks of spaces and of unknown characters, names of reserved
# pieces, what Unicode's normal forms change, what has no width, what takes several bytes.
ODD_TEXTS = [
    *("\ue009", "\ue020", "\u2581", "\u2585", "\u2047", "\ufffd", "Ġ", "Ċ", "##", "\ufeff", "\u200b", "\u00a0"),
    *("\t", "\0", "\r", " ", "  ", "   ", "\n", "\n\n", "\u3000", "\u2028", "\x85"),
    *("<s>", "</s>", "<unk>", "<mask>", "<0x41>", "[MASK]", "[UNK]", "<|endoftext|>", "<extra_0>", "<extra_id_0>"),
    *("ﬁ", "１２", "e\u0301", "é", "İ", "ß", "한국어", "中文 字", "🗼", "\U0001f469\u200d\U0001f680", "don't", "I'LL"),
]  # fmt: skip
OWN_KINDS = ("sentencepiece", "sentencepiece-unigram", "byte-bpe", "llama3", "wordpiece")
LOSSLESS_KINDS = OWN_KINDS[:-1]
T5_PIECES = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA2_PIECES = {
    "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "split_digits": True,
}  # fmt: skip


def check_fitting_size(
    train: Callable[..., bytes],
    tokenizer: Callable[[bytes], Tokenizer],
    text: str,
    vocab_size: int,
    message: str,
    *,
    is_largest: bool,
) -> None:
    """Assert that a vocabulary which doesn't fit a text is refused with one that does, or with the largest."""
    with pytest.raises(UsageError, match=message) as caught:
        train([text * 5], vocab_size=vocab_size)
    fitting = int(str(caught.value).split("vocab_size=")[1].split()[0])
    assert tokenizer(train([text * 5], vocab_size=fitting)).vocab_size == fitting
    if is_largest:
        with pytest.raises(UsageError):
            train([text * 5], vocab_size=fitting + 1)
