"""Tokenizers: train one, load one, encode and decode without losing a character."""

from megatfm.tokenizers.tokenizer import Tokenizer, load
from megatfm.tokenizers.train import train_sentencepiece

__all__ = ["Tokenizer", "load", "train_sentencepiece"]
