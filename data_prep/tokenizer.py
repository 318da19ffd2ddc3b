"""The tokenizer of a corpus: trained as its config says, or brought along."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from megatfm import tokenizers
from megatfm.config.prep import TokenizerConfig
from megatfm.data.files import write_whole
from megatfm.tokenizers import Tokenizer

MODEL, JSON, CONFIG = tokenizers.TOKENIZER_FILENAMES

_TRAIN: dict[str, Callable[..., bytes]] = {
    "sentencepiece-bpe": tokenizers.train_sentencepiece,
    "sentencepiece-unigram": partial(tokenizers.train_sentencepiece, model_type="unigram"),
    "byte-bpe": tokenizers.train_byte_bpe,
    "wordpiece": tokenizers.train_wordpiece,
}


def make(config: TokenizerConfig, texts: Iterable[str]) -> dict[str, bytes]:
    """Name → content of the tokenizer's files. The texts are not read if there is nothing to train."""
    reserve = {
        "vocab_size": config.vocab_size,
        "sentinels": config.sentinels,
        "modes": config.has_mode_tokens,
    }
    train = partial(_TRAIN[config.kind], texts, **reserve)
    if config.file is not None:
        files = tokenizers.tokenizer_files(config.file)
    elif config.kind == "byte-bpe":
        files = _with_roles(train(pattern=config.pattern))
    elif config.kind == "wordpiece":
        files = _with_roles(train(lowercase=config.lowercase))
    else:
        files = {MODEL: train()}
    if MODEL in files:
        facts = tokenizers.SentencePieceTokenizer(files[MODEL]).describe()
        files[JSON] = f"{json.dumps(facts, indent=2)}\n".encode()
    return files


def write(folder: Path, files: dict[str, bytes]) -> Tokenizer:
    """Put them into a folder in place of any other tokenizer's."""
    for name in tokenizers.TOKENIZER_FILENAMES:
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    return tokenizers.load(folder)


def _with_roles(data: bytes) -> dict[str, bytes]:
    """With the file from which transformers' AutoTokenizer knows which token plays which role."""
    tokenizer = tokenizers.HuggingFaceTokenizer(data)
    ids = {role: getattr(tokenizer, role) for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep")}
    roles = {
        f"{role}_token": tokenizer.id_to_piece(token) for role, token in ids.items() if token is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    return {CONFIG: f"{json.dumps(config, indent=2)}\n".encode(), JSON: data}
