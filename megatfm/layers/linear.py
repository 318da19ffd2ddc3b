"""Linear layers and embedding tables that declare how their weights are initialised."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.initialisation import Constant, InitDistribution


class Linear(nn.Module):
    """y = x Wᵀ (+ b) with W [d_out, d_in] drawn from `initial`; b starts at 0.

    heads: number of heads in the output, which tensor parallelism keeps whole. matmul: computes y from x, W and b; fp8
    replaces it (`megatfm/models/dtypes.py`). lora: an adapter whose output is added (`megatfm/layers/lora.py`).
    """

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(
        self, d_in: int, d_out: int, initial: InitDistribution, *, bias: bool = False, heads: int | None = None
    ) -> None:
        super().__init__()
        self.heads, self.matmul = heads, F.linear
        self.lora: Any = None
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.initial = {"weight": initial, **({"bias": Constant(0.0)} if bias else {})}

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x, self.weight, self.bias)
        return y if self.lora is None else y + self.lora(x)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b for the given (shard of) W and b, plus the adapter's output (see `parallel.styles`)."""
        y = self.matmul(x, weight, bias)
        return y if self.lora is None else y + self.lora(x)

    def compute_matrix(self) -> Tensor:
        """Return W plus the adapter's update, for layers that use the matrix directly."""
        return self.weight if self.lora is None else self.weight + self.lora.compute_matrix()


class Embedding(nn.Module):
    """An embedding table [rows, width]."""

    def __init__(self, rows: int, width: int, initial: InitDistribution) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.initial, self.roles = {"weight": initial}, {"weight": "embedding"}

    def forward(self, indices_BT: Tensor) -> Tensor:
        return F.embedding(indices_BT, self.weight)
