"""Rules for mixtures of experts, in both layouts of transformers: a tensor an expert, or all of a block in one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig, TopKRouterConfig
from megatfm.convert.config_keys import Json
from megatfm.convert.table import WeightMapping, rename
from megatfm.errors import UsageError


@dataclass(frozen=True)
class ExpertNames:
    """Of what transformers stores of a mixture, in files with a tensor for each expert. parts: by ours."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_rules(config: ModelConfig, names: ExpertNames, *, fused: bool) -> list[WeightMapping]:
    """Of one block's router and experts. fused: with all experts of a block in one tensor, the gate above the rest."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    if fused:
        return [
            rename("ffn.router.weight", "mlp.gate.weight"),
            WeightMapping(
                ("ffn.experts.w_gate", "ffn.experts.w_up"),
                ("mlp.experts.gate_up_proj",),
                concat_gate_up,
                _halves,
            ),
            rename("ffn.experts.w_down", "mlp.experts.down_proj"),
        ]
    parts = [("gate", names.gate), ("up", names.up), ("down", names.down)]
    return [
        rename("ffn.router.weight", f"{names.block}.gate.weight"),
        *(
            WeightMapping(
                (f"ffn.experts.w_{ours}",),
                tuple(f"{names.block}.experts.{e}.{theirs}.weight" for e in range(experts.n_experts)),
                unbind_experts,
                stacked,
            )
            for ours, theirs in parts
        ),
    ]


def require_dropless(config: ModelConfig) -> MoEConfig:
    """The section of a model's experts. Raises UsageError for what these architectures of transformers lack."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    for key in ("capacity_factor", "expert_capacity"):
        if (given := getattr(experts, key)) is not None:
            raise UsageError(
                f"model.ffn.{key} = {given}: transformers has no capacity here, and would compute otherwise"
            )
    return experts


def require_top_k_router(config: ModelConfig) -> TopKRouterConfig:
    """Raises UsageError for another router."""
    return require_variant(require_dropless(config).router, TopKRouterConfig, "model.ffn.router")


def top_k_moe_section(theirs: Json, n_experts: int, d_ff: int, activation: str, *, normalise: bool) -> Json:
    """Our section, without the weights of terms of the loss: transformers' factor means another sum."""
    return {
        "name": "moe",
        "d_ff": d_ff,
        "activation": activation,
        "n_experts": n_experts,
        "top_k": theirs["num_experts_per_tok"],
        "router": {"name": "top_k", "norm_topk_prob": normalise},
    }


def unbind_experts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """All experts' matrices in one, each for itself."""
    return tensors[0].unbind()


def stacked(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The reverse."""
    return [torch.stack(list(tensors))]


def concat_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Join the gate's and the up projection's output channels, experts first."""
    return [torch.cat(list(tensors), dim=1)]


def _halves(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[0].chunk(2, dim=1)
