"""The table of relative positions of DeBERTa's attention (He et al. 2021); `attention = "disentangled"` reads it."""

from torch import Tensor, nn

from megatfm.config import DebertaPositionConfig, ModelConfig, require_variant
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.position.registry import POSITIONS, PositionEncoding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.table import Embedding

# R relative positions (twice the farthest distance), D model width


class RelativePositionTable(nn.Module):
    """A vector [D] for every relative position, one table for all layers."""

    tp_plan = (("table", "shared by heads"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        rows = 2 * require_variant(config.position, DebertaPositionConfig, "model.position").max_distance
        self.table = Embedding(rows, config.d_model, initial("relative", rows, config.d_model))

    def forward(self, sequence: SequenceMetadata, causal: bool) -> Tensor:
        """[R, D]."""
        return self.table.weight


DISENTANGLED = POSITIONS.register("deberta")(PositionEncoding(score_bias=RelativePositionTable))
