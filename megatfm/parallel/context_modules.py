"""Context parallelism of modules other than attention: lookups of tokens, and mixtures of experts.

Modules that look up tokens beside them, or of another row, fetch those of other ranks. A mixture with a capacity or
with expert choice gathers the values that depend on the full row; a soft mixture adds its slots up over ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.transfer import move_to_device, to_host
from megatfm.parallel.collectives import all_gather, reduce_from_group, reduce_scatter
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, fetch, make_fetch_all_plan
from megatfm.parallel.layout import replace_forward

# B batch, T tokens of a rank, S tokens of the row, L tokens after a fetch, M masked tokens, K chosen experts,
# N documents, X = N · slots per document, x slots of a rank, D model width


def make_span_boundary_forward(_: nn.Module, cp: ContextParallel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the `forward` of a module that looks up the tokens beside masked spans, by their distances."""

    def forward(
        hidden_BTD: Tensor, left_BT: Tensor, right_BT: Tensor, row_left_BS: Tensor, row_right_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        indices_by_rank = cp.token_indices(row_left_BS.shape[1])
        row = to_host(row_left_BS), to_host(row_right_BS)
        needed = [find_span_boundary_indices(*row, indices) for indices in indices_by_rank]
        plan = FetchPlan.build(cp, indices_by_rank, needed)
        x_BLD = fetch(hidden_BTD[:, None], plan)[:, 0]
        local, fetched = (move_to_device(x, left_BT.device) for x in (indices_by_rank[cp.rank], plan.indices))
        rows, columns = (left_BT > 0).nonzero(as_tuple=True)
        left_M, right_M = local[columns] - left_BT[rows, columns], local[columns] + right_BT[rows, columns]
        left_M, right_M = (torch.searchsorted(fetched, indices_M) for indices_M in (left_M, right_M))
        return x_BLD[rows, left_M], x_BLD[rows, right_M]

    return forward


def make_token_gather_forward(_: nn.Module, cp: ContextParallel) -> Callable[..., Tensor]:
    """Make the `forward` of a module that looks up tokens of another row, of which each rank fetches what it needs."""

    def forward(x_BSD: Tensor, indices_BT: Tensor, length: int) -> Tensor:
        host_BT, indices_by_rank = to_host(indices_BT), cp.token_indices(indices_BT.shape[1])
        needed = [find_gathered_indices(host_BT[:, indices]) for indices in indices_by_rank]
        plan = FetchPlan.build(cp, cp.token_indices(length), needed)
        x_BLD = fetch(x_BSD[:, None], plan)[:, 0]
        local, fetched = (move_to_device(x, indices_BT.device) for x in (indices_by_rank[cp.rank], plan.indices))
        # searchsorted wants contiguous input; an index of −1 becomes 0.
        indices_BT = torch.searchsorted(fetched, indices_BT[:, local].contiguous())
        return x_BLD.gather(1, indices_BT[..., None].expand(-1, -1, x_BSD.shape[-1]))

    return forward


def find_gathered_indices(indices_BT: Tensor) -> Tensor:
    """Return the sorted indices that tokens look up in any row, without −1."""
    return indices_BT[indices_BT >= 0].unique()


def find_span_boundary_indices(left_BS: Tensor, right_BS: Tensor, token_indices: Tensor) -> Tensor:
    """Return the sorted indices of tokens beside spans that the masked ones of `token_indices` look up in any row."""
    rows, columns = (left_BS[:, token_indices] > 0).nonzero(as_tuple=True)
    masked = token_indices[columns]
    return torch.cat([masked - left_BS[rows, masked], masked + right_BS[rows, masked]]).unique()


MODULES_WITH_ROW_HOOKS = ("experts", "router")
"""Submodules of a mixture that may have `gather_row` (gathers values of the full row) and its inverse `split_row`."""


def install_moe(moe: nn.Module, cp: ContextParallel) -> None:
    """Make capacity, expert choice and per-row counts of a mixture refer to full rows.

    A capacity serves a row's choices in token order, across ranks. Ranks therefore gather the router's output of the
    row (K integers per token; for expert choice, a probability per expert), and each keeps the part of its local
    tokens. No gradient flows through this.
    """
    for owner in MODULES_WITH_ROW_HOOKS:
        module: Any = moe.get_submodule(owner)
        if hasattr(module, "split_row"):
            replace_forward(module.gather_row, partial(_gather_row, cp))
            replace_forward(module.split_row, _take_local_tokens)
    replace_forward(moe.get_submodule("reduce_counts"), partial(reduce_from_group, group=cp.group))


def _gather_row(cp: ContextParallel, values_BTK: Tensor, sequence: Any) -> Tensor:
    """Gather [B, S, K] in row order."""
    plan = sequence.cached("all keys", lambda: make_fetch_all_plan(cp, sequence.length))
    return fetch(values_BTK[:, None], plan)[:, 0]


def _take_local_tokens(values_BSK: Tensor, sequence: Any) -> Tensor:
    """Take the local tokens' values [B, T, K]."""
    return values_BSK[:, sequence.indices]


def install_soft_moe(mixture: Any, cp: ContextParallel) -> None:
    """Make the slots of a soft mixture means over full rows, and divide the slots among ranks.

    Each rank computes means over its local tokens. They are weighted by the sums of exponentiated scores (Dao et al.
    2022) and added up; slots are divided equally among ranks, and expert outputs gathered.
    """
    padding_expert = mixture.experts.n_experts
    replace_forward(mixture.gather_slots, partial(_merge_slots, cp, padding_expert))
    replace_forward(mixture.return_slots, partial(_gather_slots, cp))


def count_slots_per_rank(slots: int, ranks: int) -> int:
    """Return the number of slots per rank; those of the last ranks may be padding."""
    return -(-slots // ranks)


def _merge_slots(
    cp: ContextParallel, padding_expert: int, means_BXD: Tensor, scores_BNTS: Tensor, choices_BX1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return this rank's slots [B, x, D] and their experts [B, x, 1], `padding_expert` for padding."""
    logs_BX = scores_BNTS.logsumexp(2).flatten(1)
    logs_BX = logs_BX.clamp(min=torch.finfo(logs_BX.dtype).min)  # documents without local tokens
    weights_PBX = all_gather(logs_BX[None], 0, cp.group).softmax(0)
    weighted_BXD = means_BXD * weights_PBX[cp.rank, ..., None].to(means_BXD.dtype)
    per_rank = count_slots_per_rank(choices_BX1.shape[1], cp.size)
    padding = per_rank * cp.size - choices_BX1.shape[1]
    slots_BxD = reduce_scatter(F.pad(weighted_BXD, (0, 0, 0, padding)), 1, cp.group)
    choices_BX1 = F.pad(choices_BX1, (0, 0, 0, padding), value=padding_expert)
    return slots_BxD, choices_BX1[:, cp.rank * per_rank :][:, :per_rank]


def _gather_slots(cp: ContextParallel, output_BxD: Tensor, slots: int) -> Tensor:
    """Gather the outputs of all slots [B, X, D]."""
    return all_gather(output_BxD, 1, cp.group)[:, :slots]
