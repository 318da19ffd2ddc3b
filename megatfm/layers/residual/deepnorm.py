"""DeepNorm: N(α x + S(x)) (Wang et al. 2022)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import StackKind, deepnorm_constants
from megatfm.layers.norm import make_norm
from megatfm.layers.residual.registry import RESIDUALS, ResidualDropout
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("deepnorm")
class DeepNorm(nn.Module):
    """Post-norm with a residual stream scaled up by the depth; goes with `init = "deepnorm"`."""

    tp_plan = (("norm", "sequence"),)

    def __init__(self, config: ModelConfig, place: str, stack: StackKind) -> None:
        super().__init__()
        self.norm, self.branch = make_norm(config), ResidualDropout(config, place)
        self.alpha = deepnorm_constants(config, stack)[0]

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.norm(self.alpha * x_BTD + self.branch(y_BTD, sequence))
