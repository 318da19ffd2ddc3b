"""The table of relative positions of DeBERTa's attention (He et al. 2021); `attention = "disentangled"` reads it."""

from torch import Tensor, nn

from megatfm.config import DisentangledPositionConfig, ModelConfig, expect
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, Position
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.table import Table

# R relative positions (twice the farthest distance), D model width


class RelativeTable(nn.Module):
    """A vector [D] for every relative position, one table for all layers."""

    plan = (("table", "shared by heads"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        rows = 2 * expect(config.position, DisentangledPositionConfig, "model.position").max_distance
        self.table = Table(rows, config.d_model, initial("relative", rows, config.d_model))

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """[R, D]."""
        return self.table.weight


DISENTANGLED = POSITIONS.register("disentangled")(Position(bias=RelativeTable))
