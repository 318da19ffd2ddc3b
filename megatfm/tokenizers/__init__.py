"""Tokenizers: train one, read published ones, encode and decode."""

from megatfm.tokenizers.base import Tokenizer
from megatfm.tokenizers.hugging_face import HuggingFaceTokenizer
from megatfm.tokenizers.loading import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATES_FOLDER,
    TOKENIZER_FILENAMES,
    find_tokenizer_file,
    list_chat_templates,
    load,
    read_tokenizer_config,
    read_tokenizer_files,
)
from megatfm.tokenizers.sentence_piece import SentencePieceTokenizer
from megatfm.tokenizers.training import train_byte_bpe, train_sentencepiece, train_wordpiece

__all__ = [
    "CHAT_TEMPLATE", "CHAT_TEMPLATES_FOLDER", "TOKENIZER_FILENAMES", "HuggingFaceTokenizer", "SentencePieceTokenizer",
    "Tokenizer", "find_tokenizer_file", "list_chat_templates", "load", "read_tokenizer_config", "read_tokenizer_files",
    "train_byte_bpe", "train_sentencepiece", "train_wordpiece",
]  # fmt: skip
