"""Models with low-rank adapters that do something from the start, and their comparison with one device."""

from torch import nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.initialisation import Normal
from megatfm.layers.linear import Linear
from megatfm.layers.moe.experts import Experts
from megatfm.models import build
from tests.support.frozen_parity import errors_of_two_steps
from tests.support.models import FAMILY_MODELS

LORA = {"rank": 3, "alpha": 6.0}
"""A rank that no number of processes divides."""


DIVISIBLE = FAMILY_MODELS["llama"].with_changes(
    {"d_model": 60, "attention.n_heads": 30, "attention.n_kv_heads": 30, "ffn.d_ff": 60}
)
"""A decoder whose sizes two, three and five ranks divide."""
EXPERTS = DIVISIBLE.with_changes(
    {"ffn": {"name": "moe", "n_experts": 60, "top_k": 3, "d_ff": 30, "dropout": 0.0}}
)
EXPERT_TARGETS = ["experts.w_*", "wv"]


def adapted_config(name: str, **options: object) -> ModelConfig:
    """A small model of a family, with adapters."""
    return FAMILY_MODELS[name].with_changes({"lora": {**LORA, **options}})


def build_adapted(config: ModelConfig) -> nn.Module:
    """A model whose B are not 0 at first: then A would have no gradient."""
    model = build(config)
    for module in model.modules():
        if isinstance(module, Linear) and module.lora is not None:
            module.lora.b.initial = {"weight": Normal(0.2)}
        if isinstance(module, Experts):
            module.initial |= {name: Normal(0.2) for name in module.initial if name.endswith("_lora_b")}
    return model


def lora_errors(config: ModelConfig, parallel: ParallelConfig) -> set[str]:
    """Differences from one device, whose weights plain torch moves, in two steps."""
    return errors_of_two_steps(config, build_adapted, parallel)
