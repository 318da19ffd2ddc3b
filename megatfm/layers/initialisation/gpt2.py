"""GPT-2's initial weights (Radford et al. 2019, section 2.3)."""

from megatfm.config import ModelConfig, require_variant
from megatfm.config.model_parts import NormalInitSection
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Role, StackKind, depth
from megatfm.ops.initial import Normal


@INITIALISATIONS.register("gpt2")
def gpt2(config: ModelConfig, stack: StackKind) -> Initialiser:
    """N(0, std²); the projections back to the residual stream by 1/√(2 depth) smaller."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    smaller = (2 * depth(config, stack)) ** -0.5

    def initial(role: Role, d_in: int, d_out: int) -> Normal:
        residual = role in ("out", "ffn_out")
        return Normal(std * smaller if residual else std)

    return initial
