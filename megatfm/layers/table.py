"""A table of vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.initial import InitDistribution


class Embedding(nn.Module):
    """Rows of a [rows, width] matrix, looked up."""

    def __init__(self, rows: int, width: int, initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.initial, self.roles = {"weight": initial}, {"weight": "embedding"}

    def forward(self, indices_BT: Tensor) -> Tensor:
        return F.embedding(indices_BT, self.weight)
