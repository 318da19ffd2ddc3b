"""The same normal distribution for every matrix, as in GPT-1 (Radford et al. 2018, section 4.1)."""

from megatfm.config import ModelConfig, expect
from megatfm.config.model_parts import WithStd
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Stack
from megatfm.ops.initial import Normal


@INITIALISATIONS.register("normal")
def normal(config: ModelConfig, stack: Stack) -> Initialiser:
    """N(0, std²)."""
    std = expect(config.init, WithStd, "model.init").std
    return lambda role, d_in, d_out: Normal(std)
