"""Expert parallelism: tokens travel to the ranks of their experts (dispatch), and the outputs back (combine).

The styles of experts say how they are cut; below stands what mixtures need under context parallelism, where a rank has
some of a row's tokens: numbers that follow from whole rows, and slots that are means over all of their tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.ops.torch_private import is_fake
from megatfm.parallel.collectives import (
    TensorParallelGroup,
    all_gather,
    all_to_all,
    all_to_all_overlapped,
    reduce_from_group,
    reduce_scatter,
)
from megatfm.parallel.context_parallel import ContextParallel, fetch, fetch_all_plan
from megatfm.parallel.layout import Shard, TensorLayout, replace_forward
from megatfm.parallel.mesh import EXPERT, EXPERT_DATA_AXES, Mesh
from megatfm.parallel.styles import (
    ENTER,
    PARTIAL_OUTPUT,
    REPLICATED_OUTPUT,
    SPLIT_OUTPUT,
    Layouts,
    ParallelStyle,
    gather_input_replicated,
    register_style,
)

# B batch, T tokens of a rank, S tokens of the row, K chosen experts, M rows, R rows that have arrived, P ranks,
# E experts on a rank, N documents, X = N · slots of each, x slots of a rank, D model width

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, D] sorted by expert, and where each expert's end, int32 → what experts make of them, [M, D]."""


def dispatch_and_combine(expert_function: ExpertFunction, group: ProcessGroup) -> Callable[..., Tensor]:
    """Wrap a function of the local experts in two all-to-alls, so that it applies the experts of all ranks of the
    group, equally many each. The result takes `meanwhile`, a function to call while rows are on their way."""
    ranks = group.size()

    def dispatch_run_combine(
        rows_MD: Tensor, ends: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        leaving_PE = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1).long()
        arriving_PE = all_to_all(leaving_PE, [1] * ranks, [1] * ranks, group)
        input_splits, output_splits = _read_splits(leaving_PE, arriving_PE, len(rows_MD))
        leaving_MD = rows_MD[: sum(input_splits)]
        if meanwhile:
            arrived_RD = all_to_all_overlapped(meanwhile, leaving_MD, input_splits, output_splits, group)
        else:
            arrived_RD = all_to_all(leaving_MD, input_splits, output_splits, group)
        order_R, inverse_R = expert_order(arriving_PE, sum(output_splits))
        expert_ends = arriving_PE.sum(0).cumsum(0, dtype=torch.int32)
        output_RD = expert_function(arrived_RD[order_R], expert_ends)[inverse_R]
        output_MD = all_to_all(output_RD, output_splits, input_splits, group)
        return F.pad(output_MD, (0, 0, 0, len(rows_MD) - len(output_MD)))

    return dispatch_run_combine


def _read_splits(leaving_PE: Tensor, arriving_PE: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the rows that go to each rank and come from each: the host's one read, as it allocates the receive buffer.
    Of shapes without values: as many to each."""
    counts_2P = torch.stack([leaving_PE.sum(1), arriving_PE.sum(1)])
    if is_fake(leaving_PE):
        counts_2P.cpu()  # what is traced counts the read
        even = [rows // len(leaving_PE)] * len(leaving_PE)
        return even, even
    input_splits, output_splits = counts_2P.tolist()
    return input_splits, output_splits


def expert_order(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order [R] by (expert, source) of rows that came by (source, expert), and its inverse."""
    ranks, experts = counts_PE.shape
    numbers = torch.arange(experts, device=counts_PE.device).repeat(ranks)
    order_R = numbers.repeat_interleave(counts_PE.flatten(), output_size=rows).argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(rows, device=order_R.device)
    return order_R, inverse_R


def _shard_experts(layout: TensorLayout, mesh: Mesh) -> TensorLayout:
    """Cut by experts over their own axis first; tensor parallelism cuts the remaining weights. Where the data ranks
    don't divide that, ZeRO cuts within each expert: of 2 experts on 8 ranks it would fill 6 ranks up with nothing."""
    if (parts := mesh.size(EXPERT)) > 1:
        shard = Shard(EXPERT, 0, mesh.rank(EXPERT), parts)
        layout = replace(layout, shards=(shard, *layout.shards), data_axes=EXPERT_DATA_AXES)
    (_, (experts, *inner)), ranks = layout.region, mesh.size(layout.data_axes.shard)
    is_cut_within = experts % ranks and inner and inner[0] % ranks == 0
    return replace(layout, fsdp_dim=1) if is_cut_within else layout


def _dispatch(module: nn.Module, mesh: Mesh, layouts: Layouts) -> None:
    if (parts := mesh.size(EXPERT)) > 1:
        local: ExpertFunction = module.run_experts  # type: ignore[assignment]
        module.ep_size = parts  # type: ignore[assignment]
        module.run_experts = dispatch_and_combine(local, mesh.group(EXPERT))  # type: ignore[assignment]
        # FSDP2, which takes experts by themselves, puts its hooks on what a module returns, and warns of a view.
        module.register_forward_hook(lambda _, __, output: (output[0].clone(), *output[1:]))


def _by_expert(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    (first, *_), (experts, *_) = layouts["w_up"].region[0], layouts["w_up"].shape
    module.first = first % (experts // module.ep_size)  # type: ignore[assignment, operator]


def _by_channel(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """Every rank takes all rows; the last bias, which is not cut, is added once."""
    _by_expert(module, ranks, layouts)
    module.down_bias_scale = float(ranks.rank == 0)  # type: ignore[assignment]


FOLDED_EXPERTS = ParallelStyle(
    "expert_parallel",
    apply=_by_expert,
    shard_experts=_shard_experts,
    apply_expert_parallel=_dispatch,
    communication=(),
)
EXPERTS_BY_CHANNEL = replace(
    FOLDED_EXPERTS,
    dims={"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2},
    gradient="partial",
    apply=_by_channel,
)
register_style(
    replace(
        FOLDED_EXPERTS,
        dim=0,
        expert_tp_overrides={"by_channel": EXPERTS_BY_CHANNEL, "folded": FOLDED_EXPERTS},
    )
)
"""Matrices of experts: cut by experts, by the inner channels of each, or not at all by tensor-parallel ranks, which
then keep their own tokens."""

LOCAL_TOKENS = register_style(ParallelStyle("no_communication", communication=()))
"""A module that takes each rank's own tokens."""

register_style(replace(ENTER, name="gather_expert_input", expert_tp_overrides={"folded": LOCAL_TOKENS}))
"""Style "gather_input" for cut experts."""

register_style(
    replace(PARTIAL_OUTPUT, name="reduce_expert_output", expert_tp_overrides={"folded": LOCAL_TOKENS})
)
"""Style "reduce_output" for cut experts."""

register_style(replace(SPLIT_OUTPUT, name="split_kept_choices", expert_tp_overrides={"folded": LOCAL_TOKENS}))
"""Style "split_output" for cut experts."""

register_style(
    replace(
        LOCAL_TOKENS,
        name="gather_choices",
        expert_tp_overrides={"folded": replace(REPLICATED_OUTPUT, apply=gather_input_replicated)},
    )
)
"""Gathers the expert choices of a row on every rank if tp is folded into ep; else all ranks have the row anyway."""

register_style(replace(LOCAL_TOKENS, name="split_choices", expert_tp_overrides={"folded": SPLIT_OUTPUT}))
"""Keeps the choices of a rank's own tokens if tp is folded into ep."""


OWNERS_OF_ROW_SEAMS = ("experts", "router")
"""Parts of a mixture that may have `gather_row`, which gathers numbers of a row, and `split_row`, its reverse."""


def install_moe(moe: nn.Module, contexts: ContextParallel) -> None:
    """Have a mixture's capacity, expert choice and counts by row be of whole rows.

    A capacity takes a row's choices in the order of its tokens, on whichever rank they are. So ranks gather the
    router's output for the row (K integers a token; of experts that choose, a probability of each expert), and each
    keeps its own tokens' part. No gradient goes back.
    """
    for owner in OWNERS_OF_ROW_SEAMS:
        module: Any = moe.get_submodule(owner)
        if hasattr(module, "split_row"):
            replace_forward(module.gather_row, partial(_gather_row, contexts))
            replace_forward(module.split_row, _local_tokens)
    replace_forward(moe.get_submodule("counted"), partial(reduce_from_group, group=contexts.group))


def _gather_row(contexts: ContextParallel, numbers_BTK: Tensor, sequence: Any) -> Tensor:
    """[B, S, K], in the order of the row."""
    plan = sequence.cached("everything", lambda: fetch_all_plan(contexts, sequence.length))
    return fetch(numbers_BTK[:, None], plan)[:, 0]


def _local_tokens(numbers_BSK: Tensor, sequence: Any) -> Tensor:
    """[B, T, K]."""
    return numbers_BSK[:, sequence.indices]


def install_soft_moe(mixture: nn.Module, contexts: ContextParallel) -> None:
    """Have a soft mixture's slots be means over whole rows, and each rank take its share of them to experts.

    Each rank makes means over its own tokens, which are weighted by the sums of the exponentials of their scores (Dao
    et al. 2022) and added up; the slots are divided equally among ranks, and the outputs gathered.
    """
    mixture_: Any = mixture
    padding_expert = mixture_.experts.n_experts
    replace_forward(mixture_.gather_slots, partial(_merge_slots, contexts, padding_expert))
    replace_forward(mixture_.return_slots, partial(_gather_slots, contexts))


def slots_per_rank(slots: int, ranks: int) -> int:
    """Return the number of a row's slots that a rank takes; the last ranks have some that are padding."""
    return -(-slots // ranks)


def _merge_slots(
    contexts: ContextParallel,
    padding_expert: int,
    means_BXD: Tensor,
    scores_BNTS: Tensor,
    choices_BX1: Tensor,
) -> tuple[Tensor, Tensor]:
    """[B, x, D] and [B, x, 1]: a rank's share of the slots, with their experts; `padding_expert` where it has none."""
    logs_BX = scores_BNTS.logsumexp(2).flatten(1)
    logs_BX = logs_BX.clamp(min=torch.finfo(logs_BX.dtype).min)  # of documents with no token here
    weights_PBX = all_gather(logs_BX[None], 0, contexts.group).softmax(0)
    weighted_BXD = means_BXD * weights_PBX[contexts.rank, ..., None].to(means_BXD.dtype)
    per_rank = slots_per_rank(choices_BX1.shape[1], contexts.size)
    padding = per_rank * contexts.size - choices_BX1.shape[1]
    slots_BxD = reduce_scatter(F.pad(weighted_BXD, (0, 0, 0, padding)), 1, contexts.group)
    choices_BX1 = F.pad(choices_BX1, (0, 0, 0, padding), value=padding_expert)
    return slots_BxD, choices_BX1[:, contexts.rank * per_rank :][:, :per_rank]


def _gather_slots(contexts: ContextParallel, output_BxD: Tensor, slots: int) -> Tensor:
    """[B, X, D]."""
    return all_gather(output_BxD, 1, contexts.group)[:, :slots]
