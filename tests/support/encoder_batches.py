"""Options and tokens for encoders that are compared with transformers'."""

import torch
from torch import Tensor

from megatfm.config import ModelConfig

VOCABULARY, LENGTHS = 47, (13, 9, 11)
"""Ids of the small vocabulary, and tokens of the rows of a batch."""
PAD = 1
"""Never among the tokens that count: transformers gives a padding token's embedding no gradient."""
ENCODER_OPTIONS = {
    "family": "encoder",
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "n_layers": 3,
    "attention.n_heads": 4,
    "ffn.d_ff": 40,
    "norm.name": "layer_norm",
    "norm.eps": 1e-7,
    "norm.placement": "post",
    "embedding.norm": True,
    "ffn.activation": "gelu",
    "ffn.bias": True,
    "embedding.n_segments": 2,
    "lm_head.name": "transform",
    "lm_head.bias": True,
}
LEARNED_POSITIONS = {"attention.bias": True, "position.name": "learned", "position.max_positions": 15}
"""BERT's attention and positions; all but DeBERTa have them."""
BERT_ENCODER = ENCODER_OPTIONS | LEARNED_POSITIONS
DEBERTA = {"attention.name": "deberta", "position.name": "deberta"}
DEBERTA_V3 = {
    **DEBERTA, "attention.name": "deberta_v2", "position.name": "deberta_v2", "position.buckets": 6,
    "position.max_distance": 15,
}  # fmt: skip
MODERNBERT = {
    "attention.name": "gqa", "norm.placement": "pre", "norm.bias": False, "norm.first_attention_norm": False,
    "ffn.bias": False,
    "ffn.activation": "geglu", "embedding.n_segments": 0, "lm_head.transform_bias": False,
    "layer_types": ["global", "local", "local"],
    "layer_type.global": {"position.theta": 500.0},
    "layer_type.local": {"position.theta": 20.0, "attention.pattern": {"name": "window", "width": 4}},
}  # fmt: skip


def draw_tokens(high: int, *shape: int, seed: int, low: int = 0) -> Tensor:
    """Random integers from low up to below high."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(config: ModelConfig) -> dict[str, Tensor]:
    """Rows of odd lengths, padded to the longest, as transformers takes them."""
    longest = max(LENGTHS)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    tokens = draw_tokens(VOCABULARY, len(LENGTHS), longest, seed=0, low=PAD + 1).where(mask == 1, PAD)
    batch = {"input_ids": tokens, "attention_mask": mask}
    if config.embedding.n_segments:
        batch["token_type_ids"] = draw_tokens(config.embedding.n_segments, *tokens.shape, seed=1)
    if config.family == "discriminator":
        batch["labels"] = draw_tokens(2, *tokens.shape, seed=2)
        return batch
    chosen = (draw_tokens(3, *tokens.shape, seed=2) == 0) & (mask == 1)
    batch["labels"] = draw_tokens(VOCABULARY, *tokens.shape, seed=3).where(chosen, -100)
    return batch


def sentence_labels(config: ModelConfig) -> dict[str, Tensor]:
    """Labels of sentence pairs under transformers' name, which differs."""
    if "sentence" not in config.extra_heads:
        return {}
    name = "sentence_order_label" if config.embedding.dim else "next_sentence_label"
    return {name: torch.tensor([0, 1, 1])}


def our_inputs(batch: dict[str, Tensor], sentences: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The same batch as we take it: padding is document −1, a sentence's class stands at its first token."""
    documents = batch["attention_mask"] - 1
    inputs = {"documents": documents, "segments": batch.get("token_type_ids")}
    if family == "discriminator":
        return inputs | {"replaced": batch["labels"].where(documents == 0, -100)}
    for labels in sentences.values():
        inputs["sentence_targets"] = torch.full_like(documents, -100)
        inputs["sentence_targets"][:, 0] = labels
    return inputs | {"targets": batch["labels"]}
