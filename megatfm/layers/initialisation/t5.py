"""T5's initial weights (Raffel et al. 2020; its released code): scaled by fan-in, since scores are not."""

from megatfm.config import ModelConfig
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Role, StackKind
from megatfm.ops.initial import Normal


@INITIALISATIONS.register("t5")
def t5(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Standard deviations: token embedding 1, queries (d_model · head_dim)^−½, other matrices d_in^−½."""

    def initial(role: Role, d_in: int, d_out: int) -> Normal:
        match role:
            case "embedding":
                return Normal(1.0)
            case "query":
                return Normal((d_in * config.head_width) ** -0.5)
            case "position" | "segment" | "relative":
                return Normal(config.d_model**-0.5)
            case _:
                return Normal(d_in**-0.5)

    return initial
