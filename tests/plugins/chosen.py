"""A feed-forward network with a router: each token chooses one of several scales for its output.

It adds a term to the loss, which keeps the router's logits small (ST-MoE, Zoph et al. 2022, equation 5), and keeps a
bias that is moved after each step so that the choices even out (Wang et al. 2024).
"""

import torch
from torch import nn

from megatfm.cost import Cost, sum_costs
from megatfm.layers.feed_forward import FFN, FFNS
from megatfm.layers.initialisation import Constant
from megatfm.layers.linear import Linear
from megatfm.layers.loss_terms import AuxiliaryLoss, BlockOutput, TokenSum


@FFNS.register("chosen")
class Chosen(nn.Module):
    """p · scale ⊙ FFN(x) for the choice argmax(logits + bias) and its probability p = softmax(logits)."""

    tp_plan = (("", "sequence_parallel"), ("router", "sequence_parallel"))

    def __init__(self, config, initial):
        super().__init__()
        d, self.rate, choices = config.d_model, config.ffn.rate, config.ffn.choices
        self.router = Linear(d, choices, initial("dense", d, choices))
        self.scales = nn.Parameter(torch.empty(choices, d))
        self.register_buffer("bias", torch.empty(choices), persistent=True)
        self.initial = {"scales": Constant(1.0), "bias": Constant(0.0)}
        self.dense = FFN(config, initial)
        self.total = TokenSum()
        self.observed = {}

    @staticmethod
    def terms(config):
        return {"router": AuxiliaryLoss(weight=config.ffn.weight, normalised_by="tokens")}

    def cost(self, tokens):
        """A token meets one of the scales."""
        choices, d = self.scales.shape
        of_scales = Cost(vector_macs=d * tokens.n, inactive_parameters=(choices - 1) * d)
        return sum_costs((self.router, self.dense), tokens) + of_scales

    def forward(self, x_BTD, sequence):
        logits_BTE = self.router(x_BTD)
        choice_BT = (logits_BTE + self.bias).argmax(-1)
        chosen_BT1 = logits_BTE.softmax(-1).gather(-1, choice_BT[..., None])
        y_BTD = self.dense(x_BTD, sequence) * chosen_BT1 * self.scales[choice_BT]
        precise_BTE = logits_BTE.to(torch.promote_types(logits_BTE.dtype, torch.float32))
        loss = self.total(precise_BTE.logsumexp(-1).square(), sequence)
        is_chosen_BTE = choice_BT[..., None] == torch.arange(len(self.bias), device=x_BTD.device)
        load_E = (is_chosen_BTE & self.total.non_padding_mask(sequence)[..., None]).sum((0, 1))
        return BlockOutput(y_BTD, {"router": loss}, {"load": load_E})

    def accumulate_counts(self, counts):
        self.observed = {"load": self.observed.get("load", 0) + counts["load"]}

    def update(self, observed):
        load_E = observed["load"].to(self.bias.dtype)
        self.bias += self.rate * (load_E.mean() - load_E).sign()

    def reset_counts(self):
        self.observed = {}
