"""Sandwich norm: x + N(S(N(x))) (Ding et al. 2021, section 2.2)."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import StackKind
from megatfm.layers.norm import make_norm
from megatfm.layers.residual.registry import RESIDUALS, ResidualDropout
from megatfm.layers.sequence import SequenceMetadata


@RESIDUALS.register("sandwich")
class SandwichNorm(nn.Module):
    """A norm on the way into the sublayer, and one on the way out."""

    tp_plan = (("norm", "sequence"), ("norm_out", "sequence"))

    def __init__(self, config: ModelConfig, place: str, stack: StackKind) -> None:
        super().__init__()
        self.norm, self.norm_out, self.branch = (
            make_norm(config),
            make_norm(config),
            ResidualDropout(config, place),
        )

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD)

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x_BTD + self.branch(self.norm_out(y_BTD), sequence)
