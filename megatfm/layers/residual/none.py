"""No norm: x + S(x)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import Stack
from megatfm.layers.residual.registry import RESIDUALS, Branch
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("none")
class NoNorm(nn.Module):
    """The sum alone."""

    def __init__(self, config: ModelConfig, place: str, stack: Stack) -> None:
        super().__init__()
        self.branch = Branch(config, place)

    def before(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def after(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(y_BTD, sequence)
