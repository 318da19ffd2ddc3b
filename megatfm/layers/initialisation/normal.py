"""The same normal distribution for every matrix, as in GPT-1 (Radford et al. 2018, section 4.1)."""

from megatfm.config import ModelConfig, require_variant
from megatfm.config.model_parts import NormalInitSection
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, StackKind
from megatfm.ops.initial import Normal


@INITIALISATIONS.register("normal")
def normal(config: ModelConfig, stack: StackKind) -> Initialiser:
    """N(0, std²)."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    return lambda role, d_in, d_out: Normal(std)
