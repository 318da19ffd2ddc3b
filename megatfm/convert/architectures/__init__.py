"""One file for each family of architectures, registered under the names of transformers' classes."""

from megatfm.convert.architectures import albert, bert, deberta, electra, gpt2, llama, roberta

__all__ = ["albert", "bert", "deberta", "electra", "gpt2", "llama", "roberta"]
