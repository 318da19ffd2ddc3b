"""ReLU² (So et al. 2021, "Primer"): max(x, 0)²."""

import torch.nn.functional as F
from torch import Tensor

from megatfm.layers.activation.registry import ACTIVATIONS, Activation


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return F.relu(x).square()


RELU2 = ACTIVATIONS.register("relu2")(Activation(relu2))
