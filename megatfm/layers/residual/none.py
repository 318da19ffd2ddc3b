"""No norm: x + S(x)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import StackKind
from megatfm.layers.residual.registry import RESIDUALS, ResidualDropout
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("none")
class NoNorm(nn.Module):
    """The sum alone."""

    def __init__(self, config: ModelConfig, place: str, stack: StackKind) -> None:
        super().__init__()
        self.branch = ResidualDropout(config, place)

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(y_BTD, sequence)
