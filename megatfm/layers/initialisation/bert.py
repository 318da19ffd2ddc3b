"""BERT's initial weights (its released code): a truncated normal distribution."""

from megatfm.config import ModelConfig, expect
from megatfm.config.model_parts import WithStd
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Stack
from megatfm.ops.initial import TruncatedNormal


@INITIALISATIONS.register("bert")
def bert(config: ModelConfig, stack: Stack) -> Initialiser:
    """N(0, std²) within two standard deviations."""
    std = expect(config.init, WithStd, "model.init").std
    return lambda role, d_in, d_out: TruncatedNormal(std)
