"""DeepNorm: N(α x + S(x)) (Wang et al. 2022)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Stack, alpha_beta
from megatfm.layers.norm import make_norm
from megatfm.layers.residual.registry import RESIDUALS, Branch
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("deepnorm")
class DeepNorm(nn.Module):
    """Post-norm with a residual stream scaled up by the depth; goes with `init = "deepnorm"`."""

    plan = (("norm", "sequence"),)

    def __init__(self, config: ModelConfig, place: str, stack: Stack) -> None:
        super().__init__()
        self.norm, self.branch = make_norm(config), Branch(config, place)
        self.alpha = alpha_beta(config, stack)[0]

    def before(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def after(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.norm(self.alpha * x_BTD + self.branch(y_BTD, sequence))
