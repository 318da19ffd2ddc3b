"""Soft mixtures where rows are cut: slots are means over all of a row's tokens, of which each rank has some.

Each rank makes means over its own tokens, which count by the sums of the exponentials of their scores (Dao et al.
2022). The sum over ranks is dealt out: experts on each rank get equally many slots, and what they make is gathered.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.parallel.collectives import all_gather, reduce_scatter
from megatfm.parallel.context_exchange import ContextParallel
from megatfm.parallel.forward import replace_forward

# B batch, T tokens of a rank, N documents, S slots of each, X = N · S, x slots of a rank, R ranks, D model width


def of_whole_rows(mixture: nn.Module, contexts: ContextParallel) -> None:
    """Have a soft mixture's slots be of whole rows, and each rank take its share of them to experts."""
    seams: Any = mixture
    padding_expert = seams.experts.n_experts
    replace_forward(seams.means, partial(_merge_slots, contexts, padding_expert))
    replace_forward(seams.made, partial(_gather_slots, contexts))


def slots_per_rank(slots: int, ranks: int) -> int:
    """How many of a row's slots a rank takes; on the last ones some are none."""
    return -(-slots // ranks)


def _merge_slots(
    contexts: ContextParallel,
    padding_expert: int,
    means_BXD: Tensor,
    scores_BNTS: Tensor,
    choices_BX1: Tensor,
) -> tuple[Tensor, Tensor]:
    """[B, x, D] and [B, x, 1]: a rank's share of the slots, with their experts; `none` where it has no slot."""
    logs_BX = scores_BNTS.logsumexp(2).flatten(1)
    logs_BX = logs_BX.clamp(min=torch.finfo(logs_BX.dtype).min)  # of documents with no token here
    parts_RBX = all_gather(logs_BX[None], 0, contexts.group).softmax(0)
    weighted_BXD = means_BXD * parts_RBX[contexts.rank, ..., None].to(means_BXD.dtype)
    each = slots_per_rank(choices_BX1.shape[1], contexts.size)
    rest = each * contexts.size - choices_BX1.shape[1]
    slots_BxD = reduce_scatter(F.pad(weighted_BXD, (0, 0, 0, rest)), 1, contexts.group)
    choices_BX1 = F.pad(choices_BX1, (0, 0, 0, rest), value=padding_expert)
    return slots_BxD, choices_BX1[:, contexts.rank * each :][:, :each]


def _gather_slots(contexts: ContextParallel, made_BxD: Tensor, slots: int) -> Tensor:
    """[B, X, D]."""
    return all_gather(made_BxD, 1, contexts.group)[:, :slots]
