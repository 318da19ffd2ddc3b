"""Soft mixtures (Puigcerver et al. 2024, algorithm 1): experts get weighted means of a document's tokens.

For encoders alone: means are over the whole document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import SoftMoEConfig
from megatfm.cost import Cost, TokenCounts, module_cost
from megatfm.layers.feed_forward import FFNS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.experts import Experts
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D model width, N documents of a row, S slots of all experts together, X = N · S


class GatherSlots(nn.Module):
    """Means over the tokens here, whose scores are given, → those over all of a row's tokens, with the experts that
    they go to: the same where rows are whole."""

    def forward(self, means_BXD: Tensor, scores_BNTS: Tensor, choices_BX1: Tensor) -> tuple[Tensor, Tensor]:
        return means_BXD, choices_BX1


class ReturnSlots(nn.Module):
    """Seam of context parallelism: gathers experts' outputs for all slots of a row; the identity without it."""

    def forward(self, made_BXD: Tensor, slots: int) -> Tensor:
        return made_BXD


@FFNS.register("soft_moe")
class SoftMoE(nn.Module):
    """Each slot is a mean of a document's tokens, and each token gets a mean of its slots' outputs."""

    cp_plan = "soft_moe"

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, SoftMoEConfig, "model.ffn")
        self.slots = options.slots
        n_slots = options.n_experts * options.slots
        self.weight = nn.Parameter(torch.empty(n_slots, config.d_model))
        self.initial = {"weight": initial("dense", config.d_model, n_slots)}
        self.experts = Experts(config, initial)
        # Seams at which ranks that share a row compute means over all of it, and each passes some to experts.
        self.gather_slots, self.return_slots = GatherSlots(), ReturnSlots()

    def cost(self, tokens: TokenCounts) -> Cost:
        """Experts see slots, and both ways between tokens and slots are products of activations."""
        slots, d = self.weight.shape
        mixing = 2.0 * tokens.n * slots * d
        return Cost(
            matmul_macs=tokens.n * slots * d, attention_macs=mixing, visible_attention_macs=mixing
        ) + module_cost(self.experts, tokens.with_count(slots))

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_BTS = F.linear(x_BTD.to(precise), self.weight.to(precise))
        owners_BNT = _document_membership(sequence)
        scores_BNTS = logits_BTS[:, None].masked_fill(~owners_BNT[..., None], float("-inf"))
        shares_BNTS = scores_BNTS.softmax(2).nan_to_num(0.0)  # of documents that the row has not
        B, N, _, S = shares_BNTS.shape
        means_BXD = torch.einsum("bnts,btd->bnsd", shares_BNTS.to(x_BTD.dtype), x_BTD).flatten(1, 2)
        choices_BX1 = (torch.arange(S, device=x_BTD.device) // self.slots).repeat(N).expand(B, -1)[..., None]
        slots_BXD, choices_BX1 = self.gather_slots(means_BXD, scores_BNTS, choices_BX1)
        made_BXD, _ = self.experts(slots_BXD, torch.ones_like(slots_BXD[..., :1]), choices_BX1, sequence)
        made_BXD = self.return_slots(made_BXD, N * S)
        means_BNTS = logits_BTS.softmax(-1)[:, None] * owners_BNT[..., None]
        made_BNSD = made_BXD.unflatten(1, (N, S))
        return torch.einsum("bnts,bnsd->btd", means_BNTS.to(x_BTD.dtype), made_BNSD)


def _document_membership(sequence: SequenceMetadata) -> Tensor:
    """Boolean [B, N, T]: which tokens belong to a row's document; padding to none."""
    if sequence.documents is None:
        return torch.ones_like(sequence.positions, dtype=torch.bool)[:, None]
    numbers_N1 = torch.arange(sequence.max_documents_per_row, device=sequence.documents.device)[:, None]
    return sequence.documents[:, None] == numbers_N1
