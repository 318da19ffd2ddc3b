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

RELU = ACTIVATIONS.register("relu")(Activation(F.relu))

# ReLU² (So et al. 2021, "Primer"): max(x, 0)².


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return F.relu(x).square()


RELU2 = ACTIVATIONS.register("relu2")(Activation(relu2))

# GELU (Hendrycks & Gimpel 2016): x Φ(x), and its approximation by tanh, which GPT-1 and GPT-2 use.


def gelu_tanh(x: Tensor) -> Tensor:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return F.gelu(x, approximate="tanh")


GELU = ACTIVATIONS.register("gelu")(Activation(F.gelu))
GELU_TANH = ACTIVATIONS.register("gelu_tanh")(Activation(gelu_tanh))

# GeGLU (Shazeer 2020, equation 6): GELU(x W) ⊙ (x V); T5 v1.1 takes the tanh form.

GEGLU = ACTIVATIONS.register("geglu")(Activation(F.gelu, gated=True))
GEGLU_TANH = ACTIVATIONS.register("geglu_tanh")(Activation(gelu_tanh, gated=True))

# Swish, also called SiLU (Ramachandran et al. 2017): x sigmoid(x).

SWISH = ACTIVATIONS.register("swish")(Activation(F.silu))

# SwiGLU (Shazeer 2020, equation 6): Swish(x W) ⊙ (x V).

SWIGLU = ACTIVATIONS.register("swiglu")(Activation(F.silu, gated=True))

# gpt-oss's SwiGLU (OpenAI 2025, section 2.2 and its code): both inputs are clamped, and W_up x + 1 is gated.

ALPHA, LIMIT = 1.702, 7.0
"""The factor inside the sigmoid that approximates GELU, and the clamping bound."""


def quick_gelu(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), GELU's approximation in OpenAI's CLIP."""
    return x * torch.sigmoid(ALPHA * x)


QUICK_GELU = ACTIVATIONS.register("quick_gelu")(Activation(quick_gelu))


def clamped_swish(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), with x clamped to at most 7."""
    x = x.clamp(max=LIMIT)
    return x * torch.sigmoid(ALPHA * x)


def clamped_plus_one(x: Tensor) -> Tensor:
    """Return x + 1, with x clamped to [−7, 7]."""
    return x.clamp(-LIMIT, LIMIT) + 1


CLAMPED_SWIGLU = ACTIVATIONS.register("clamped_swiglu")(
    Activation(clamped_swish, gated=True, up_function=clamped_plus_one)
)


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
