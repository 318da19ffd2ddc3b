"""Pre-norm: x + S(N(x)) (Xiong et al. 2020)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import StackKind
from megatfm.layers.norm import make_norm
from megatfm.layers.residual.registry import RESIDUALS, ResidualDropout
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("pre")
class PreNorm(nn.Module):
    """A norm on the way into the sublayer."""

    tp_plan = (("norm", "sequence"),)

    def __init__(self, config: ModelConfig, place: str, stack: StackKind) -> None:
        super().__init__()
        self.norm, self.branch = make_norm(config), ResidualDropout(config, place)

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD)

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(y_BTD, sequence)
