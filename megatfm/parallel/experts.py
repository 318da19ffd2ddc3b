"""Expert parallelism: rows travel to the ranks of their experts, and what these make of them travels back."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.parallel.collectives import all_to_all, all_to_all_overlapped

# M rows, R rows that have arrived, P ranks, E experts on a rank

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, D] sorted by expert, and where each expert's end, int32 → what experts make of them, [M, D]."""


def travelling(expert_function: ExpertFunction, group: ProcessGroup) -> Callable[..., Tensor]:
    """expert_function: of the experts that are here → of those of all ranks of the group, which have equally many
    each. What that gives takes something to do besides, `meanwhile`, while rows are on their way."""
    ranks = group.size()

    def dispatch_run_combine(
        rows_MD: Tensor, ends: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        leaving_PE = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1).long()
        arriving_PE = all_to_all(leaving_PE, [1] * ranks, [1] * ranks, group)
        # The host's one look: what is received has to be made room for.
        sent, received = torch.stack([leaving_PE.sum(1), arriving_PE.sum(1)]).tolist()
        leaving_MD = rows_MD[: sum(sent)]
        if meanwhile:
            arrived_RD = all_to_all_overlapped(meanwhile, leaving_MD, sent, received, group)
        else:
            arrived_RD = all_to_all(leaving_MD, sent, received, group)
        order_R, inverse_R = expert_order(arriving_PE, sum(received))
        made_RD = expert_function(arrived_RD[order_R], arriving_PE.sum(0).cumsum(0, dtype=torch.int32))[
            inverse_R
        ]
        made_MD = all_to_all(made_RD, received, sent, group)
        return F.pad(made_MD, (0, 0, 0, len(rows_MD) - len(made_MD)))

    return dispatch_run_combine


def expert_order(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order [R] of rows by (expert, source), which have come by (source, expert), and the way back."""
    ranks, experts = counts_PE.shape
    numbers = torch.arange(experts, device=counts_PE.device).repeat(ranks)
    order_R = numbers.repeat_interleave(counts_PE.flatten(), output_size=rows).argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(rows, device=order_R.device)
    return order_R, inverse_R
