"""A small Llama with a chat template, and conversations that it can learn."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

WORDS = ("user", "assistant", "rome", "oslo", "bern", "red", "old", "lamp")
ANSWERS = {"rome": "red lamp", "oslo": "old lamp", "bern": "lamp"}
MARKS = ("<|pad|>", "<|unk|>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save_tokenizer(folder: Path, template: str | None, **roles: str) -> None:
    """A tokenizer of whole words. roles: of special tokens, as bos_token = "<|begin|>"."""
    built = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate((*MARKS, *WORDS))}, unk_token="<|unk|>")
    )
    built.pre_tokenizer, built.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=built, additional_special_tokens=list(MARKS), **roles)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def save_llama(folder: Path, template: str | None = CHATML) -> None:
    """A small Llama, whose EOS is not what ends a turn, with a tokenizer of whole words."""
    roles = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), MARKS, strict=False))
    save_tokenizer(folder, template, **roles)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(MARKS) + len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def conversations() -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in ANSWERS.items()
    ] * 4
