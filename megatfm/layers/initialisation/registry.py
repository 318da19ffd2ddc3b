from collections.abc import Callable
from typing import Literal

from megatfm.config import ModelConfig
from megatfm.layers.initialisation.mup import Narrower
from megatfm.ops.initial import InitDistribution
from megatfm.registry import Registry

Role = Literal[
    "embedding", "position", "segment", "relative",  # tables
    "query", "key", "value", "out",  # attention
    "ffn_in", "ffn_gate", "ffn_out",
    "dense",  # poolers, transforms, projections of embeddings
    "head",
]  # fmt: skip
"""What a matrix is for."""

StackKind = Literal["encoder", "decoder"]

Initialiser = Callable[[Role, int, int], InitDistribution]
"""(role, d_in, d_out) → how the matrix starts; for a table d_in is its number of rows and d_out its width."""

INITIALISATIONS: Registry[Callable[[ModelConfig, StackKind], Initialiser]] = Registry(
    "initialisation (model.init)"
)


def initialiser(config: ModelConfig, stack_kind: StackKind = "decoder") -> Initialiser:
    """The one that a config names, for one of its stacks."""
    initial = INITIALISATIONS.get(config.init.name)(config, stack_kind)
    if config.mup is None:
        return initial
    return Narrower(initial, config.init.name, config.mup.base_width / config.d_model)


def depth(config: ModelConfig, stack: StackKind) -> int:
    """Blocks of a stack."""
    return config.encoder_layers if stack == "encoder" else config.n_layers
