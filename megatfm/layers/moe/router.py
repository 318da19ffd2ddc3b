"""What a router is, and how experts are chosen from scores."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry

# B batch, T tokens, D model width, E experts, K chosen experts


class RouterOutput(NamedTuple):
    """What a router says of each token.

    expert_indices [B, T, K]: the best first, or their number for none; expert_weights [B, T, K]: of what they make.
    logits [B, T, E], probabilities [B, T, E]: of which terms of the loss are made; the latter add up to 1. balanced:
    numbers [B, T, E] by the name of a term of the loss that keeps their sums over the batch even.
    """

    expert_indices: Tensor
    expert_weights: Tensor
    logits: Tensor
    probabilities: Tensor
    balanced: Mapping[str, Tensor] = MappingProxyType({})


class RowSeam(nn.Module):
    """Numbers of tokens, or of the rows that these are of: the same where rows are whole."""

    def forward(self, x: Tensor, sequence: SequenceMetadata) -> Tensor:
        return x


class Router(nn.Module):
    """Logits for each expert, in float32 at least; subclasses choose by them."""

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        n_experts, d, self.top_k = options.n_experts, config.d_model, options.top_k
        self.weight = nn.Parameter(torch.empty(n_experts, d))
        self.initial = {"weight": initial("dense", d, n_experts)}

    def logits(self, x_BTD: Tensor) -> Tensor:
        """[B, T, E]: bfloat16 would decide near ties by rounding (Fedus et al. 2022, section 2.4)."""
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        return F.linear(x_BTD.to(precise), self.weight.to(precise))

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        """Choose. Raises NotImplementedError: subclasses say how."""
        raise NotImplementedError

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        """Told after each step how often each expert was chosen in it, and the means of what is `evened`, both over the
        global batch."""


ROUTERS: Registry[Callable[[ModelConfig, Initialiser], Any]] = Registry("router (model.ffn.router)")
"""Made: modules that are called with x [B, T, D] and sequence, and have `top_k` and `update` as a Router has."""


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """The places [..., k] of the k highest scores, the highest first; of equal ones the first.

    torch.topk leaves open which of equal scores it takes, and takes others in tensors of another size.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
