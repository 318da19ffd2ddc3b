"""Feed-forward networks, plain or gated (Vaswani et al. 2017, section 3.3; Shazeer 2020), and their activations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry

FFNS: Registry[Callable[[ModelConfig, Initialiser], nn.Module]] = Registry("feed-forward network")
"""Feed-forward networks by name, called with x [B, T, D] and sequence; see `FFN`."""


@dataclass(frozen=True)
class Activation:
    """An activation function.

    function: elementwise. gated: the network computes function(W_gate x) ⊙ W_up x. up_function: applied to W_up x of a
    gated network first; None: identity.
    """

    function: Callable[[Tensor], Tensor]
    gated: bool = False
    up_function: Callable[[Tensor], Tensor] | None = None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine W_gate x and W_up x of a gated network."""
        return self.function(gate) * (up if self.up_function is None else self.up_function(up))


ACTIVATIONS: Registry[Activation] = Registry("activation")

SIGMOID_FACTOR, CLAMP = 1.702, 7.0
"""The factor with which x σ(1.702 x) approximates GELU, and gpt-oss's clamping bound."""


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, "Primer")."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), GELU's approximation in GPT-1 and GPT-2."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), GELU's approximation in OpenAI's CLIP."""
    return x * torch.sigmoid(SIGMOID_FACTOR * x)


def clamped_swish(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), with x clamped to at most 7."""
    return quick_gelu(x.clamp(max=CLAMP))


def clamped_plus_one(x: Tensor) -> Tensor:
    """Return x + 1, with x clamped to [−7, 7]."""
    return x.clamp(-CLAMP, CLAMP) + 1


ACTIVATIONS.register("relu")(Activation(F.relu))
ACTIVATIONS.register("relu2")(Activation(relu2))
# GELU (Hendrycks & Gimpel 2016): x Φ(x).
ACTIVATIONS.register("gelu")(Activation(F.gelu))
ACTIVATIONS.register("gelu_tanh")(Activation(gelu_tanh))
ACTIVATIONS.register("quick_gelu")(Activation(quick_gelu))
# Swish, also called SiLU (Ramachandran et al. 2017): x σ(x).
ACTIVATIONS.register("swish")(Activation(F.silu))
# Gated (Shazeer 2020, equation 6): GELU(x W) ⊙ (x V), of which T5 v1.1 takes the tanh form, and Swish(x W) ⊙ (x V).
ACTIVATIONS.register("geglu")(Activation(F.gelu, gated=True))
ACTIVATIONS.register("geglu_tanh")(Activation(gelu_tanh, gated=True))
ACTIVATIONS.register("swiglu")(Activation(F.silu, gated=True))
# gpt-oss (OpenAI 2025, section 2.2 and its code): both inputs are clamped, and W_up x + 1 is gated.
ACTIVATIONS.register("clamped_swiglu")(Activation(clamped_swish, gated=True, up_function=clamped_plus_one))


@FFNS.register("dense")
class FFN(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) ⊙ W_up x) where the activation is gated."""

    tp_plan = (
        ("", "gather_input"),
        ("w_gate", "colwise"),
        ("w_up", "colwise"),
        ("dropout", "local_shard_dropout"),
        ("w_down", "rowwise"),
    )

    cp_plan = "local"

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        activation, d, d_ff = ACTIVATIONS.get(config.ffn.activation), config.d_model, config.ffn.d_ff
        self.activation, bias = activation, config.ffn.bias
        self.w_gate = Linear(d, d_ff, initial("ffn_gate", d, d_ff), bias=bias) if activation.gated else None
        self.w_up = Linear(d, d_ff, initial("ffn_in", d, d_ff), bias=bias)
        self.dropout = Dropout(config.ffn.dropout, "ffn inner")
        self.w_down = Linear(d_ff, d, initial("ffn_out", d_ff, d), bias=bias)

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if self.w_gate is None:
            inner_BTF = self.activation.function(self.w_up(x_BTD))
        else:
            inner_BTF = self.activation(self.w_gate(x_BTD), self.w_up(x_BTD))
        return self.w_down(self.dropout(inner_BTF, sequence))
