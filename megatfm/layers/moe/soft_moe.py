"""Soft mixture of experts (Puigcerver et al. 2024, algorithm 1): experts process weighted means of a document's tokens.

For encoders only, because means are over the whole document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import SoftMoEConfig
from megatfm.cost import Cost, TokenCounts, compute_module_cost
from megatfm.layers.feed_forward import FFNS
from megatfm.layers.initialisation import Initialiser
from megatfm.layers.moe.experts import Experts
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, D model width, N documents of a row, S slots of all experts together, X = N · S


class SlotGather(nn.Module):
    """Identity; context parallelism turns means over local tokens into means over all tokens of a row."""

    def forward(self, slot_inputs_BXD: Tensor, scores_BNTS: Tensor, choices_BX1: Tensor) -> tuple[Tensor, Tensor]:
        return slot_inputs_BXD, choices_BX1


class SlotOutputGather(nn.Module):
    """Identity; context parallelism gathers the experts' outputs for all slots of a row."""

    def forward(self, outputs_BXD: Tensor, slots: int) -> Tensor:
        return outputs_BXD


@FFNS.register("soft_moe")
class SoftMoE(nn.Module):
    """Each slot's input is a weighted mean of a document's tokens; each token gets a weighted mean of slot outputs."""

    cp_plan = "soft_moe"

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.ffn, SoftMoEConfig, "model.ffn")
        self.slots = options.slots
        n_slots = options.n_experts * options.slots
        self.weight = nn.Parameter(torch.empty(n_slots, config.d_model))
        self.initial = {"weight": initial("dense", config.d_model, n_slots)}
        self.experts = Experts(config, initial)
        # Context parallelism replaces both, so that each rank runs its share of a row's slots.
        self.gather_slots, self.return_slots = SlotGather(), SlotOutputGather()

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of experts on the slots, and of the dispatch and combine products between tokens and
        slots."""
        slots, d = self.weight.shape
        mixing = 2.0 * tokens.n * slots * d
        return Cost(
            matmul_macs=tokens.n * slots * d, attention_macs=mixing, visible_attention_macs=mixing
        ) + compute_module_cost(self.experts, tokens.with_count(slots))

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_BTS = F.linear(x_BTD.to(precise), self.weight.to(precise))
        is_member_BNT = sequence.find_document_members()  # padding is in none
        scores_BNTS = logits_BTS[:, None].masked_fill(~is_member_BNT[..., None], float("-inf"))
        # NaN: documents that exist in other rows only.
        dispatch_weights_BNTS = scores_BNTS.softmax(2).nan_to_num(0.0)
        B, N, _, S = dispatch_weights_BNTS.shape
        slot_inputs_BXD = torch.einsum("bnts,btd->bnsd", dispatch_weights_BNTS.to(x_BTD.dtype), x_BTD).flatten(1, 2)
        choices_BX1 = (torch.arange(S, device=x_BTD.device) // self.slots).repeat(N).expand(B, -1)[..., None]
        slots_BXD, choices_BX1 = self.gather_slots(slot_inputs_BXD, scores_BNTS, choices_BX1)
        outputs_BXD, _ = self.experts(slots_BXD, torch.ones_like(slots_BXD[..., :1]), choices_BX1, sequence)
        outputs_BXD = self.return_slots(outputs_BXD, N * S)
        combine_weights_BNTS = logits_BTS.softmax(-1)[:, None] * is_member_BNT[..., None]
        outputs_BNSD = outputs_BXD.unflatten(1, (N, S))
        return torch.einsum("bnts,bnsd->btd", combine_weights_BNTS.to(x_BTD.dtype), outputs_BNSD)
