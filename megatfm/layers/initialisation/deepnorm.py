"""DeepNorm's initial weights (Wang et al. 2022, figure 2): Xavier's, with feed-forward, value and output scaled by β.

α and β depend on the depths N of the encoder and M of the decoder, and on which of the two a stack is.
"""

from megatfm.config import ModelConfig
from megatfm.layers.initialisation.registry import INITIALISATIONS, Initialiser, Role, StackKind
from megatfm.layers.initialisation.xavier import xavier, xavier_uniform
from megatfm.ops.initial import InitDistribution


def deepnorm_constants(config: ModelConfig, stack: StackKind) -> tuple[float, float]:
    """Factor on the residual stream, and factor on the initial weights, of a stack's layers."""
    if config.family != "encoder_decoder":
        return (2 * config.n_layers) ** 0.25, (8 * config.n_layers) ** -0.25
    n, m = config.encoder_layers, config.n_layers
    if stack == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


@INITIALISATIONS.register("deepnorm")
def deepnorm(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Xavier with the gain β on feed-forward, value and output projections."""
    plain, beta = xavier(config, stack), deepnorm_constants(config, stack)[1]

    def initial(role: Role, d_in: int, d_out: int) -> InitDistribution:
        if role in ("value", "out", "ffn_in", "ffn_gate", "ffn_out"):
            return xavier_uniform(d_in, d_out, beta)
        return plain(role, d_in, d_out)

    return initial
