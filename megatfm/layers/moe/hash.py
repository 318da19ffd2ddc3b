"""Experts by the token itself, chosen once and for all (Roller et al. 2021, section 3.1, random hash)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.router import ROUTERS, RouterOutput, stable_topk
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import dropout as keyed


class TokenHash(nn.Module):
    """Numbers [B, T, width] between 0 and 1 that depend on the token and on nothing else."""

    def forward(self, sequence: SequenceMetadata, width: int) -> Tensor:
        return keyed.uniform(self.token_rng_keys(sequence), width)

    def token_rng_keys(self, sequence: SequenceMetadata) -> Tensor:
        """int64 [B, T]. Raises UsageError where the model reads no tokens."""
        if sequence.tokens is None:
            raise UsageError(
                "model.ffn.router.name = 'hash' chooses by tokens, and the model reads none: choose another"
            )
        return keyed.fold_in(sequence.tokens.long(), 1)


@ROUTERS.register("hash")
class HashRouter(nn.Module):
    """Nothing is learned: each expert that a token has counts alike."""

    tp_plan = (("hashed", "keys of own tokens"),)

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, MoEConfig, "model.ffn")
        self.top_k, self.n_experts, self.hashed = options.top_k, options.n_experts, TokenHash()

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> RouterOutput:
        scores_BTE = self.hashed(sequence, self.n_experts)
        choices_BTK = stable_topk(scores_BTE, self.top_k)
        weights_BTK = torch.full(choices_BTK.shape, 1 / self.top_k, dtype=x_BTD.dtype, device=x_BTD.device)
        chosen_BTE = torch.zeros_like(scores_BTE).scatter(-1, choices_BTK, 1 / self.top_k)
        return RouterOutput(choices_BTK, weights_BTK, torch.zeros_like(scores_BTE), chosen_BTE)

    def update(self, load_E: Tensor, means: Mapping[str, Tensor]) -> None:
        """Nothing to remember."""
