"""Small mixtures of experts, and inputs for them."""

from typing import Any

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.moe.moe import MoE
from megatfm.layers.sequence import SequenceMetadata

B, T, D, F_, E = 3, 11, 16, 8, 8
"""Rows, tokens, width, width of an expert, experts."""
ROUTER_LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.1, "z_loss_coef": 0.1}


def moe_config(**ffn: Any) -> ModelConfig:
    """A model of one block; ffn: options beside the usual ones."""
    ffn = {
        "name": "moe",
        "d_ff": F_,
        "n_experts": E,
        "top_k": 3,
        "router": {"name": "top_k", **ROUTER_LOSSES},
    } | ffn
    return ModelConfig.from_dotted(
        {"vocab_size": 8, "d_model": D, "n_layers": 1, "attention.n_heads": 1, "ffn": ffn}
    )


def build_moe(dtype: torch.dtype = torch.float64, seed: int = 0, **ffn: Any) -> MoE:
    """A mixture with random weights and state."""
    config = moe_config(**ffn)
    module = MoE(config, make_initialiser(config)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(0.7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    module.shares.abs_().div_(module.shares.sum())
    return module


def moe_sequence(documents: Tensor | None = None, rows: int = B) -> SequenceMetadata:
    """Rows of T tokens."""
    return SequenceMetadata(torch.arange(T).expand(rows, T), documents, rng_keys=torch.arange(rows))


def moe_inputs(dtype: torch.dtype = torch.float64, rows: int = B) -> Tensor:
    """Random inputs that take a gradient."""
    x = torch.randn(rows, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype).requires_grad_()
