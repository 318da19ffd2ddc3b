"""ReLU: max(x, 0)."""

import torch.nn.functional as F

from megatfm.layers.activation.registry import ACTIVATIONS, Activation

RELU = ACTIVATIONS.register("relu")(Activation(F.relu))
