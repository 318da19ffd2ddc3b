"""Expert parallelism: rows travel to the ranks of their experts, and what these make of them travels back."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.parallel.collectives import exchange_rows, exchange_rows_while

# M rows, R rows that have arrived, P ranks, E experts on a rank

Run = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, D] sorted by expert, and where each expert's end, int32 → what experts make of them, [M, D]."""


def travelling(run: Run, group: ProcessGroup) -> Callable[..., Tensor]:
    """run: of the experts that are here → of those of all ranks of the group, which have equally many each. What that
    gives takes something to do besides, `meanwhile`, while rows are on their way."""
    ranks = group.size()

    def everywhere(rows_MD: Tensor, ends: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        leaving_PE = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1).long()
        arriving_PE = exchange_rows(leaving_PE, [1] * ranks, [1] * ranks, group)
        # The host's one look: what is received has to be made room for.
        sent, received = torch.stack([leaving_PE.sum(1), arriving_PE.sum(1)]).tolist()
        leaving_MD = rows_MD[: sum(sent)]
        if meanwhile:
            arrived_RD = exchange_rows_while(meanwhile, leaving_MD, sent, received, group)
        else:
            arrived_RD = exchange_rows(leaving_MD, sent, received, group)
        order_R, back_R = by_expert_and_source(arriving_PE, sum(received))
        made_RD = run(arrived_RD[order_R], arriving_PE.sum(0).cumsum(0, dtype=torch.int32))[back_R]
        made_MD = exchange_rows(made_RD, received, sent, group)
        return F.pad(made_MD, (0, 0, 0, len(rows_MD) - len(made_MD)))

    return everywhere


def by_expert_and_source(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order [R] of rows by (expert, source), which have come by (source, expert), and the way back."""
    ranks, experts = counts_PE.shape
    numbers = torch.arange(experts, device=counts_PE.device).repeat(ranks)
    order_R = numbers.repeat_interleave(counts_PE.flatten(), output_size=rows).argsort(stable=True)
    back_R = torch.empty_like(order_R)
    back_R[order_R] = torch.arange(rows, device=order_R.device)
    return order_R, back_R
