"""Tokenizers: train one, read one from elsewhere, encode and decode."""

from megatfm.tokenizers.files import NAMES, files, find, load
from megatfm.tokenizers.hugging_face import HuggingFaceTokenizer
from megatfm.tokenizers.interface import Tokenizer
from megatfm.tokenizers.sentence_piece import SentencePieceTokenizer
from megatfm.tokenizers.train import train_sentencepiece
from megatfm.tokenizers.train_json import train_byte_bpe, train_wordpiece

__all__ = [
    "NAMES",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "files",
    "find",
    "load",
    "train_byte_bpe",
    "train_sentencepiece",
    "train_wordpiece",
]
