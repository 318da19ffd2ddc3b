"""In which arithmetic a model runs, and in which its weights, gradients and optimizer state are kept."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Precision:
    """param_dtype: of weights, optimizer state, and gradients that are accumulated and reduced. compute_dtype: of
    the model.
    fp8: how the products of blocks are scaled, where they are made of 8-bit floats (see `megatfm/ops/fp8.py`)."""

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    fp8: Literal["rowwise", "tensorwise"] | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes in another dtype than that of the stored weights."""
        return self.param_dtype != self.compute_dtype


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "fp8": Precision(torch.float32, torch.bfloat16, "rowwise"),
    "fp8-tensorwise": Precision(torch.float32, torch.bfloat16, "tensorwise"),
}
