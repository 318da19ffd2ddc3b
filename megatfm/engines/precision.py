"""In which arithmetic a model runs, and in which its weights, gradients and optimizer state are kept."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """stored: of weights, optimizer state, and gradients that are accumulated and reduced. computed: of the model."""

    stored: torch.dtype
    computed: torch.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes in another dtype than that of the stored weights."""
        return self.stored != self.computed


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
}
