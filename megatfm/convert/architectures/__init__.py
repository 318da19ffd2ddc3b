"""One file for each family of architectures, registered under the names of transformers' classes."""

from megatfm.convert.architectures import (
    albert,
    bert,
    big_bird,
    deberta,
    deberta_v2,
    deepseek,
    electra,
    gpt1,
    gpt2,
    llama,
    longformer,
    mistral,
    roberta,
    t5,
    xlnet,
)

__all__ = [
    "albert",
    "bert",
    "big_bird",
    "deberta",
    "deberta_v2",
    "deepseek",
    "electra",
    "gpt1",
    "gpt2",
    "llama",
    "longformer",
    "mistral",
    "roberta",
    "t5",
    "xlnet",
]
