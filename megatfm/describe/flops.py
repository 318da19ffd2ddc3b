"""FLOPs of training on one row, from what the model's parts say that they cost.

A weight costs 6 FLOPs for each token that it is multiplied with, forward and backward (Chowdhery et al. 2022, appendix
B; nothing is recomputed), and so does each product of attention, of which there are 2 for each channel of each
pair of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatfm.config import Config
from megatfm.cost import ENCODER_TOKENS, Cost, TokenCounts, module_cost
from megatfm.split_points import SplitPoint

if TYPE_CHECKING:
    from torch import nn

TRAINING_FLOPS_PER_MAC = 6
"""FLOPs of a multiplication and the addition after it, forward and, for both factors, backward."""


@dataclass(frozen=True)
class RowCost:
    """tokens: of all sides. macs: the sum over all parameters of their size times the tokens that they see.

    matmul_macs: the part of `macs` that falls on matrices. attention: FLOPs of the scores and what is done with them.
    causal: without the half on tokens that aren't seen. idle: parameters that a token does not meet.
    """

    tokens: int
    macs: float
    matmul_macs: float
    attention: float
    causal: float
    idle: int


def row_cost(config: Config, model: "nn.Module") -> RowCost:
    """What a row costs a model. Heads of masked models see the masked tokens alone."""
    from megatfm.objectives import target_fraction

    points: Sequence[SplitPoint] = getattr(model, "split_points", ())
    # ELECTRA's generator goes through its head again to sample, without gradients: it counts once.
    used = [(point.token_field, path) for point in points for path in dict.fromkeys(point.modules)]
    used = used or [("tokens", "")]
    s, sides = config.data.sequence_length, {side for side, _ in used}
    lengths = dict.fromkeys(sides, s)
    if ENCODER_TOKENS in sides:
        lengths["tokens"] = config.data.target_length or s
    predicted = target_fraction(config.objective)
    found, idle = Cost(), dict[str, int]()
    for side, path in used:
        tokens = TokenCounts(lengths[side], lengths.get(ENCODER_TOKENS, 0), predicted)
        cost = module_cost(model.get_submodule(path), tokens)
        found, idle[path] = found + cost, cost.inactive_parameters
    return RowCost(
        tokens=sum(lengths.values()),
        macs=found.matmul_macs + found.vector_macs,
        matmul_macs=found.matmul_macs,
        attention=TRAINING_FLOPS_PER_MAC * found.attention_macs,
        causal=TRAINING_FLOPS_PER_MAC * found.visible_attention_macs,
        idle=sum(idle.values()),
    )
