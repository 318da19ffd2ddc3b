"""Small tokenizers of every kind: trained here, and as the libraries of others leave them."""

import inspect
import json.decoder
import json.encoder
import textwrap
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatfm.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_byte_bpe,
    train_sentencepiece,
    train_wordpiece,
)
from tests.support.text_objectives import LLAMA2_PIECES, T5_PIECES


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Spaces, tabs, form feeds and some letters beyond ASCII."""
    sources = [inspect.getsource(module)[:20_000] for module in (json.decoder, json.encoder, textwrap, inspect)]
    return [*sources, "all:\n\tcc -o all\t*.c\n" * 200, "Größe, naïve, 東京\n" * 20]


@pytest.fixture(scope="session")
def model(texts: list[str]) -> bytes:
    return train_sentencepiece(texts, vocab_size=900, sentinels=8)


@pytest.fixture(scope="session")
def tokenizer(model: bytes) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


@pytest.fixture(scope="session")
def trained(texts: list[str], tokenizer: SentencePieceTokenizer) -> dict[str, Tokenizer]:
    """Each kind that can be trained here."""
    size: dict[str, Any] = {"vocab_size": 900, "sentinels": 8}
    unigram = train_sentencepiece(texts, **size, modes=True, model_type="unigram")
    return {
        "sentencepiece": tokenizer,
        "sentencepiece-unigram": SentencePieceTokenizer(unigram),
        "byte-bpe": HuggingFaceTokenizer(train_byte_bpe(texts, **size)),
        "llama3": HuggingFaceTokenizer(train_byte_bpe(texts, **size, pattern="llama3")),
        "wordpiece": HuggingFaceTokenizer(train_wordpiece(texts, **size)),
    }


@pytest.fixture(scope="session")
def foreign(texts: list[str]) -> Callable[..., bytes]:
    """`foreign(model_type="bpe", …)`: a SentencePiece model as others train it, which normalises its text."""
    lines = [line for text in texts for line in text.splitlines()]
    models: dict[str, bytes] = {}

    def train(**settings: Any) -> bytes:
        key = repr(sorted(settings.items()))
        if key not in models:
            buffer = BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=buffer, **{"vocab_size": 500, "minloglevel": 2, **settings}
            )
            models[key] = buffer.getvalue()
        return models[key]

    return train


@pytest.fixture(scope="session")
def folders(
    texts: list[str], foreign: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Hugging Face folders, as transformers' own classes save them."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("folders")
    bytes_ = json.loads(train_byte_bpe(texts, vocab_size=800, sentinels=0, modes=False))["model"]
    pieces = {piece: token - 6 for piece, token in bytes_["vocab"].items() if token >= 6}
    merges = [tuple(pair) for pair in bytes_["merges"]]
    words = json.loads(train_wordpiece(texts, vocab_size=800, sentinels=0, modes=False))["model"]["vocab"]
    spiece = sentencepiece.SentencePieceProcessor(model_proto=foreign(**T5_PIECES))
    unigram = [(spiece.id_to_piece(n), spiece.get_score(n)) for n in range(spiece.vocab_size())]
    sentinels = [(f"<extra_id_{n}>", 0.0) for n in range(99, -1, -1)]
    (root / "raw").mkdir()
    (root / "raw" / "tokenizer.model").write_bytes(foreign(**LLAMA2_PIECES))
    result = {
        "gpt2": transformers.GPT2Tokenizer(vocab=ended(pieces, "<|endoftext|>"), merges=merges),
        "roberta": transformers.RobertaTokenizer(vocab=framed(pieces, "<mask>"), merges=merges),
        "bert": transformers.BertTokenizer(vocab=words),
        "t5": transformers.T5Tokenizer(vocab=[*unigram, *sentinels]),
        "llama2": transformers.LlamaTokenizer.from_pretrained(root / "raw"),
    }
    for name, value in result.items():
        value.save_pretrained(root / name)
    return {name: root / name for name in result}


def ended(pieces: dict[str, int], *names: str) -> dict[str, int]:
    """Return a vocabulary with special tokens at the end, as GPT-2's."""
    return {**pieces, **{name: len(pieces) + number for number, name in enumerate(names)}}


def framed(pieces: dict[str, int], *names: str) -> dict[str, int]:
    """Return a vocabulary with four special tokens at the start and more at the end, as RoBERTa's."""
    first: Sequence[str] = ("<s>", "<pad>", "</s>", "<unk>")
    shifted = {piece: token + len(first) for piece, token in pieces.items()}
    return ended({**{name: number for number, name in enumerate(first)}, **shifted}, *names)
