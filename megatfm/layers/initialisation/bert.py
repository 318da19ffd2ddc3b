"""BERT's initial weights (its released code): a truncated normal distribution."""

from megatfm.config import ModelConfig, require_variant
from megatfm.config.model_parts import NormalInitSection
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, StackKind
from megatfm.ops.initial import TruncatedNormal


@INITIALISATIONS.register("bert")
def bert(config: ModelConfig, stack: StackKind) -> Initialiser:
    """N(0, std²) within two standard deviations."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    return lambda role, d_in, d_out: TruncatedNormal(std)
