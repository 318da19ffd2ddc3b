"""gpt-oss's SwiGLU (OpenAI 2025, section 2.2 and its code): clamped, and with 1 added to what is scaled."""

import torch
from torch import Tensor

from megatfm.layers.activation.registry import ACTIVATIONS, Activation

ALPHA, LIMIT = 1.702, 7.0
"""The factor within the sigmoid, with which it is close to GELU's; and where both outputs are clamped."""


def clamped_swish(x: Tensor) -> Tensor:
    """x σ(1.702 x), of x up to 7."""
    x = x.clamp(max=LIMIT)
    return x * torch.sigmoid(ALPHA * x)


def clamped_and_one(x: Tensor) -> Tensor:
    """x + 1, of x between −7 and 7."""
    return x.clamp(-LIMIT, LIMIT) + 1


CLAMPED_SWIGLU = ACTIVATIONS.register("clamped_swiglu")(
    Activation(clamped_swish, gated=True, other=clamped_and_one)
)
