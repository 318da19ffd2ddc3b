"""Post-norm: N(x + S(x)) (Vaswani et al. 2017)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import StackKind
from megatfm.layers.norm import make_norm
from megatfm.layers.residual.registry import RESIDUALS, ResidualDropout
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("post")
class PostNorm(nn.Module):
    """A norm on the sum."""

    tp_plan = (("norm", "sequence"),)

    def __init__(self, config: ModelConfig, place: str, stack: StackKind) -> None:
        super().__init__()
        self.norm, self.branch = make_norm(config), ResidualDropout(config, place)

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.norm(x_BTD + self.branch(y_BTD, sequence))
