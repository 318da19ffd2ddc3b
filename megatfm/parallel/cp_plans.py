"""`cp_plan`: how a class computes on a shard of a row, under context parallelism.

A module without a declaration is refused. `full_rows_reason`, where a class has one, completes the error's "needs full
rows, because …".

| `cp_plan` | The module | Under context parallelism |
|---|---|---|
| local | treats tokens independently, or consists of modules with their own plans | runs unchanged |
| attention | attends with queries to keys and values | fetches keys, uses a ring, or Ulysses |
| latent_attention | computes keys and values from narrower latents | the same, sending latents |
| global_queries | attends with the few queries that see all keys | sends the queries to the keys |
| pooling_attention | attends with one query to the tokens of each image | adds numerators and denominators over ranks |
| gather_kv | passes keys and values to attention that needs the full row | gathers them |
| span_boundary | looks up the tokens beside masked spans | fetches them |
| token_gather | looks up tokens of another row | fetches them |
| all_reduce | sums over tokens, in its submodule `all_reduce` | adds the sums over ranks |
| moe | has capacity, expert choice or balance by full rows | gathers the values that these depend on |
| soft_moe | computes slots as means over all tokens | adds means up, and divides slots among ranks |

The forwards of attention are in `context_attention` and `context_global_attention`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.transfer import move_to_device, to_host
from megatfm.parallel.collectives import all_gather, copy_to_group, reduce_from_group, reduce_scatter
from megatfm.parallel.context_attention import make_attention_forward, make_gather_kv_forward, make_latent_forward
from megatfm.parallel.context_global_attention import make_global_forward, make_pooling_forward
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, fetch, make_fetch_all_plan
from megatfm.parallel.layout import iter_blocks, replace_forward

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


CP_FORWARDS: dict[str, Callable[[nn.Module, ContextParallel], Callable[..., Any]]] = {
    "attention": make_attention_forward,
    "latent_attention": make_latent_forward,
    "global_queries": make_global_forward,
    "pooling_attention": make_pooling_forward,
    "gather_kv": make_gather_kv_forward,
    "span_boundary": make_span_boundary_forward,
    "token_gather": make_token_gather_forward,
}
"""`cp_plan` → function that makes a module's new `forward`."""


def install_context_parallel(model: nn.Module, cp: ContextParallel) -> None:
    """Install context parallelism by each module's `cp_plan`. Raises UsageError for a module without one."""
    check_context_plans(model)
    for module in model.modules():
        plan = getattr(module, "cp_plan", None)
        if plan in CP_FORWARDS:
            replace_forward(module, CP_FORWARDS[plan](module, cp))
        elif plan == "all_reduce":
            replace_forward(module.get_submodule("all_reduce"), partial(_all_reduce_both_passes, group=cp.group))
        elif plan == "moe":
            install_moe(module, cp)
        elif plan == "soft_moe":
            install_soft_moe(module, cp)


def depends_on_batch(module: nn.Module) -> bool:
    """Return whether a module is attention whose communication, or whose blocks of keys, depend on the batch."""
    return getattr(module, "cp_plan", None) in CP_FORWARDS or getattr(module, "attends_in_chunks", False)


def _all_reduce_both_passes(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks in both passes: each rank uses the sum in a different way."""
    return copy_to_group(reduce_from_group(x, group), group)


def check_context_plans(model: nn.Module) -> None:
    """Raise a UsageError for the first module without a `cp_plan`, or without the submodule that its plan needs."""
    for path, module in model.named_modules():
        if getattr(module, "cp_plan", None) == "all_reduce" and not hasattr(module, "all_reduce"):
            raise UsageError(
                f"parallel.cp > 1: {type(module).__name__} ({path}) has cp_plan = 'all_reduce' and no submodule "
                "`all_reduce` that its sums over tokens go through: add `self.all_reduce = nn.Identity()`"
            )
    for path, module in _iter_modules_that_need_cp_plan(model):
        if getattr(module, "cp_plan", None) is None:
            name = f"{type(module).__name__}{f' ({path})' if path else ''}"
            reason = getattr(module, "full_rows_reason", None)
            problem = (
                f"needs full rows, because {reason}"
                if reason
                else "needs full rows, or does not declare how it computes on a shard of them (`cp_plan`)"
            )
            raise UsageError(
                f"parallel.cp > 1: {name} {problem}: use parallel.cp = 1 with dp_shard, tp or pp, or another part"
            )


def _iter_modules_that_need_cp_plan(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of those whose class must declare a `cp_plan`.

    These are the model, its direct submodules and, in each block, attention, its core and the feed-forward network.
    """
    yield "", model
    in_blocks = {module for block in iter_blocks(model) for module in block.modules()}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if module in in_blocks:
            if name in ("attn", "cross", "ffn", "core", "global_core"):
                yield path, module
        elif ("." not in path and path and not type(module).__module__.startswith("torch.")) or (
            path.startswith("future.") and path.count(".") == 1
        ):
            yield path, module


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
