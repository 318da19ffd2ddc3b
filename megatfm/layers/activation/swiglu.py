"""SwiGLU (Shazeer 2020, equation 6)."""

import torch.nn.functional as F
from torch import Tensor

from megatfm.layers.activation.registry import ACTIVATIONS


@ACTIVATIONS.register("swiglu")
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Swish(gate) ⊙ value."""
    return F.silu(gate) * value
