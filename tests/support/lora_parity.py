"""Models with low-rank adapters that do something from the start, and their comparison with one device."""

from torch import nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.initialisation import Normal
from megatfm.layers.linear import Linear
from megatfm.models import build
from tests.support.frozen_parity import errors_of_two_steps
from tests.support.models import FAMILY_MODELS

LORA = {"rank": 3, "alpha": 6.0}
"""A rank that no number of processes divides."""


def adapted_config(name: str, **options: object) -> ModelConfig:
    """A small model of a family, with adapters."""
    return FAMILY_MODELS[name].with_changes({"lora": {**LORA, **options}})


def build_adapted(config: ModelConfig) -> nn.Module:
    """A model whose B are not 0 at first: then A would have no gradient."""
    model = build(config)
    for module in model.modules():
        if isinstance(module, Linear) and module.lora is not None:
            module.lora.b.initial = {"weight": Normal(0.2)}
    return model


def lora_errors(config: ModelConfig, parallel: ParallelConfig) -> set[str]:
    """Differences from one device, whose weights plain torch moves, in two steps."""
    return errors_of_two_steps(config, build_adapted, parallel)
