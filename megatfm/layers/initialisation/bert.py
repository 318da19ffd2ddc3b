"""BERT's initial weights (its released code): a truncated normal distribution."""

from megatfm.config import ModelConfig
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Stack
from megatfm.ops.initial import TruncatedNormal


@INITIALISATIONS.register("bert")
def bert(config: ModelConfig, stack: Stack) -> Initialiser:
    """N(0, init_std²) within two standard deviations."""
    return lambda role, d_in, d_out: TruncatedNormal(config.init_std)
