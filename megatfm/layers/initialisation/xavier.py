"""Glorot & Bengio 2010, equation 16, as in the code of Vaswani et al. 2017."""

from megatfm.config import ModelConfig
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Role, StackKind
from megatfm.ops.initial import InitDistribution, Normal, Uniform


def xavier_uniform(d_in: int, d_out: int, gain: float = 1.0) -> Uniform:
    """Uniform within gain · √(6 / (d_in + d_out))."""
    return Uniform(gain * (6 / (d_in + d_out)) ** 0.5)


@INITIALISATIONS.register("xavier")
def xavier(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Matrices by fan-in and fan-out; tables and the output head N(0, 1/d_model)."""

    def initial(role: Role, d_in: int, d_out: int) -> InitDistribution:
        if role in ("embedding", "position", "segment", "relative", "head"):
            return Normal(config.d_model**-0.5)
        return xavier_uniform(d_in, d_out)

    return initial
