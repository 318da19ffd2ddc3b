"""Options and tokens for encoders that are compared with transformers'."""

import torch
from torch import Tensor

VOCABULARY = 47
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


def draw_tokens(high: int, *shape: int, seed: int, low: int = 0) -> Tensor:
    """Random integers from low up to below high."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
