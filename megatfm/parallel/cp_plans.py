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
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.parallel.collectives import copy_to_group, reduce_from_group
from megatfm.parallel.context_attention import make_attention_forward, make_gather_kv_forward, make_latent_forward
from megatfm.parallel.context_global_attention import make_global_forward, make_pooling_forward
from megatfm.parallel.context_modules import (
    install_moe,
    install_soft_moe,
    make_span_boundary_forward,
    make_token_gather_forward,
)
from megatfm.parallel.context_parallel import ContextParallel
from megatfm.parallel.layout import iter_blocks, replace_forward

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
