"""A small tokenizer, trained once on a few modules of the standard library."""

import inspect
import json.decoder
import json.encoder
import textwrap

import pytest

from megatfm.tokenizers import SentencePieceTokenizer, train_sentencepiece


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Spaces, tabs, form feeds and some letters beyond ASCII."""
    sources = [inspect.getsource(module) for module in (json.decoder, json.encoder, textwrap, inspect)]
    return [*sources, "all:\n\tcc -o all\t*.c\n" * 200, "Größe, naïve, 東京\n" * 20]


@pytest.fixture(scope="session")
def model(texts: list[str]) -> bytes:
    return train_sentencepiece(texts, vocab_size=900, sentinels=8)


@pytest.fixture(scope="session")
def tokenizer(model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)
