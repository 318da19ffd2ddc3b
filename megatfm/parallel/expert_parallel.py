"""Expert parallelism: sends tokens to the ranks of their experts (dispatch) and outputs back (combine).

Mixtures under context parallelism, where values depend on the full row, are in `cp_plans.py`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.ops.moe import permute_rows
from megatfm.ops.torch_private import is_fake
from megatfm.ops.transfer import read_on_host
from megatfm.parallel.collectives import TensorParallelGroup, all_to_all, all_to_all_overlapped
from megatfm.parallel.layout import Shard, TensorLayout
from megatfm.parallel.mesh import EXPERT, EXPERT_DATA_AXES, Mesh
from megatfm.parallel.styles import (
    GATHER_INPUT,
    GATHER_OUTPUT_REPLICATED,
    REDUCE_OUTPUT,
    SPLIT_OUTPUT,
    Layouts,
    ParallelStyle,
    gather_input_replicated,
    register_style,
)

# M local rows, R received rows, P ranks, E experts on a rank, D model width

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""(rows [M, D] sorted by expert, end offset of each expert's rows, int32 [experts]) → expert outputs [M, D]."""


def dispatch_and_combine(
    expert_function: ExpertFunction, group: ProcessGroup, reached_share: float = 1.0
) -> Callable[..., Tensor]:
    """Wrap a function of local experts in two all-to-alls, so that it applies the experts of all ranks of the group.

    Every rank holds the same number of experts. The wrapped function takes `overlapped`, a function to call while rows
    are being sent (shared experts). reached_share: of all choices, those of the group's experts, for fake tensors.
    """
    ranks = group.size()

    def dispatch_run_combine(rows_MD: Tensor, ends: Tensor, overlapped: Callable[[], None] | None = None) -> Tensor:
        send_counts_PE = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1).long()
        recv_counts_PE = all_to_all(send_counts_PE, [1] * ranks, [1] * ranks, group)
        input_splits, output_splits = _read_splits(send_counts_PE, recv_counts_PE, round(len(rows_MD) * reached_share))
        is_sent_whole = sum(input_splits) == len(rows_MD)  # no choice was dropped
        sent_MD = rows_MD if is_sent_whole else rows_MD[: sum(input_splits)]
        if overlapped:
            received_RD = all_to_all_overlapped(overlapped, sent_MD, input_splits, output_splits, group)
        else:
            received_RD = all_to_all(sent_MD, input_splits, output_splits, group)
        order_R, inverse_R = sort_rows_by_expert(recv_counts_PE, sum(output_splits))
        expert_ends = recv_counts_PE.sum(0).cumsum(0, dtype=torch.int32)
        output_RD = expert_function(permute_rows(received_RD, order_R, inverse_R), expert_ends)
        output_RD = permute_rows(output_RD, inverse_R, order_R)
        output_MD = all_to_all(output_RD, output_splits, input_splits, group)
        return output_MD if is_sent_whole else F.pad(output_MD, (0, 0, 0, len(rows_MD) - len(output_MD)))

    return dispatch_run_combine


def _read_splits(send_counts_PE: Tensor, recv_counts_PE: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the number of rows to send to and to receive from each rank.

    The host waits for the device once here, because it allocates the receive buffer. Fake tensors have no values:
    `rows` are divided evenly.
    """
    counts_2P = read_on_host(torch.stack([send_counts_PE.sum(1), recv_counts_PE.sum(1)]))
    if is_fake(send_counts_PE):
        even = [rows // len(send_counts_PE)] * len(send_counts_PE)
        return even, even
    input_splits, output_splits = counts_2P.tolist()
    return input_splits, output_splits


def sort_rows_by_expert(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation [R] that sorts rows from (source, expert) to (expert, source) order, and its inverse."""
    ranks, experts = counts_PE.shape
    expert_ids = torch.arange(experts, device=counts_PE.device).repeat(ranks)
    order_R = expert_ids.repeat_interleave(counts_PE.flatten(), output_size=rows).argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(rows, device=order_R.device)
    return order_R, inverse_R


def _shard_experts(layout: TensorLayout, mesh: Mesh) -> TensorLayout:
    """Shard by expert over the expert axis first; tensor parallelism shards the remaining weights.

    If the data ranks do not divide the number of experts, ZeRO shards within each expert. Otherwise 2 experts on 8
    ranks would leave 6 ranks with padding.
    """
    if (ep_size := mesh.size(EXPERT)) > 1:
        shard = Shard(EXPERT, 0, mesh.rank(EXPERT), ep_size)
        layout = replace(layout, shards=(shard, *layout.shards), data_axes=EXPERT_DATA_AXES)
    (_, (experts, *inner)), ranks = layout.region, mesh.count_shards(layout.data_axes)
    is_cut_within = experts % ranks and inner and inner[0] % ranks == 0
    return replace(layout, fsdp_dim=1) if is_cut_within else layout


def _install_expert_parallel(module: nn.Module, mesh: Mesh, layouts: Layouts) -> None:
    if (ep_size := mesh.size(EXPERT)) > 1:
        (_, (local_experts, *_)), (experts, *_) = layouts["w_up"].region, layouts["w_up"].shape
        install_exchange(module, ep_size, mesh.group(EXPERT), local_experts * ep_size / experts)


def install_exchange(experts: nn.Module, ep_size: int, group: ProcessGroup, reached_share: float) -> None:
    """Have experts exchange tokens over a group.

    ep_size: ranks that share the experts. reached_share: see `dispatch_and_combine`.
    """
    run_local_experts: ExpertFunction = experts.run_experts  # type: ignore[assignment]
    experts.ep_size = ep_size  # type: ignore[assignment]
    experts.run_experts = dispatch_and_combine(run_local_experts, group, reached_share)  # type: ignore[assignment]
    # FSDP2 wraps experts separately. It hooks the tensors that a module returns, and warns about views.
    experts.register_forward_hook(lambda _, __, output: (output[0].clone(), *output[1:]))


def _shard_by_expert(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    (first, *_), (experts, *_) = layouts["w_up"].region[0], layouts["w_up"].shape
    module.first = first % (experts // module.ep_size)  # type: ignore[assignment, operator]


def _shard_by_channel(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    """Have every rank process all rows; the output bias, which is not sharded, is added once."""
    _shard_by_expert(module, tp, layouts)
    module.down_bias_scale = float(tp.rank == 0)  # type: ignore[assignment]


FOLDED_EXPERTS = ParallelStyle(
    "expert_parallel",
    apply=_shard_by_expert,
    shard_experts=_shard_experts,
    apply_expert_parallel=_install_expert_parallel,
    communication=(),
)
EXPERTS_BY_CHANNEL = replace(
    FOLDED_EXPERTS,
    dims={"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2}
    # A of `w_down` reads a rank's channels, and B of the others writes them; the adapter's other matrix is replicated.
    | {"w_gate_lora_b": 1, "w_up_lora_b": 1, "w_down_lora_a": 2},
    gradient="partial",
    apply=_shard_by_channel,
)
register_style(
    replace(FOLDED_EXPERTS, dim=0, expert_tp_overrides={"by_channel": EXPERTS_BY_CHANNEL, "folded": FOLDED_EXPERTS})
)
"""Expert matrices, sharded over tensor-parallel ranks by expert, by inner channel, or (folded) not at all."""

NO_COMMUNICATION = register_style(ParallelStyle("no_communication", communication=()))
"""A module that runs on each rank's local tokens."""

register_style(replace(GATHER_INPUT, name="gather_expert_input", expert_tp_overrides={"folded": NO_COMMUNICATION}))
"""Style "gather_input", unless experts are folded."""

register_style(replace(REDUCE_OUTPUT, name="reduce_expert_output", expert_tp_overrides={"folded": NO_COMMUNICATION}))
"""Style "reduce_output", unless experts are folded."""

register_style(replace(SPLIT_OUTPUT, name="split_kept_choices", expert_tp_overrides={"folded": NO_COMMUNICATION}))
"""Style "split_output", unless experts are folded."""

register_style(
    replace(
        NO_COMMUNICATION,
        name="gather_choices",
        expert_tp_overrides={"folded": replace(GATHER_OUTPUT_REPLICATED, apply=gather_input_replicated)},
    )
)
"""Gathers the expert choices of a row on every rank if experts are folded; else every rank has the full row."""

register_style(replace(NO_COMMUNICATION, name="split_choices", expert_tp_overrides={"folded": SPLIT_OUTPUT}))
"""Keeps the choices of a rank's local tokens if experts are folded."""
