"""One file for each family of architectures, registered under the names of transformers' classes."""

from megatfm.convert.architectures import gpt2, llama

__all__ = ["gpt2", "llama"]
