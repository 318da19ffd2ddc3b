"""How a sublayer S is joined to the residual stream x: `after(x, S(before(x)))`."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.dropout import Dropout, DropPath
from megatfm.layers.initialisation import StackKind
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry


class Residual(Protocol):
    """A module around one sublayer; it holds the sublayer's norms."""

    def input_norm(self, x_BTD: Tensor) -> Tensor:
        """What the sublayer gets."""

    def add(self, x_BTD: Tensor, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        """The residual stream after the sublayer has given y."""


RESIDUALS: Registry[Callable[[ModelConfig, str, StackKind], Residual]] = Registry("norm position")
"""Made as `RESIDUALS.get(name)(config, place, stack)`; `place` names the sublayer, for its dropout."""


class ResidualDropout(nn.Module):
    """What happens to a sublayer's output before it is added: dropout and stochastic depth."""

    tp_plan = (("dropout", "keys of own tokens"),)

    def __init__(self, config: ModelConfig, place: str) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout, place)
        self.drop_path = DropPath(place)

    def forward(self, y_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        return self.drop_path(self.dropout(y_BTD, sequence), sequence)
