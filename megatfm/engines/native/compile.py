"""Compiled blocks, and async tensor parallelism in them, which overlaps communication with matmuls piece by piece."""

import socket
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import get_machine_name, run_on_all_ranks
from megatfm.ops.attention import kernels
from megatfm.parallel.cp_plans import depends_on_batch
from megatfm.parallel.layout import replace_forward
from megatfm.parallel.mesh import TENSOR, Mesh

RECOMPILE_LIMIT = 64
"""Number of micro-batch shapes, in training and evaluation, that torch may compile a block for."""
HOW_TO_DISABLE = "set parallel.async_tp = false"

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
VIEWS = {_aten.view.default, _aten.reshape.default}


@dataclass(frozen=True)
class CompileOptions:
    """How blocks are compiled.

    autotune: choose kernels by timing them. eager_attention: keep attention out of compiled blocks. async_tp: overlap
    tensor parallelism's communication with matmuls.
    """

    autotune: bool = False
    eager_attention: bool = False
    async_tp: bool = False


def make_compile_options(config: Config, device: torch.device) -> CompileOptions | None:
    """Return how the native engine compiles blocks; None if it doesn't."""
    if not should_compile(config, device):
        return None
    eager_attention = keeps_attention_eager(config, device)
    return CompileOptions(config.train.compile == "autotune", eager_attention, config.parallel.async_tp)


def should_compile(config: Config, device: torch.device) -> bool:
    """Return whether the native engine compiles blocks.

    "auto" compiles on GPUs if no setting prevents it. On a CPU compiling gains a few per cent at most, and costs
    seconds at the start.
    """
    if config.train.compile == "auto":
        return device.type == "cuda" and config.find_compile_conflict() is None
    return bool(config.train.compile)


def keeps_attention_eager(config: Config, device: torch.device) -> bool:
    """Return whether attention stays eager in compiled blocks: for long rows on a CPU.

    There the blocks of keys to visit depend on the batch; compiled attention would use a mask of all pairs.
    """
    return device.type == "cpu" and config.data.sequence_length >= kernels.LONG


def compile_all(blocks: Iterable[nn.Module], *, autotune: bool, fullgraph: bool = True, async_tp: bool = False) -> None:
    """Compile blocks, separately for each shape: with dynamic dims, kernels would be slower after a ramp-up of lengths.

    fullgraph: with attention; False under context parallelism, where attention communicates. See `find_eager_modules`.
    """
    from torch._dynamo import config

    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if autotune else {}
    if async_tp:
        options = {"options": make_async_tp_options(autotune)}
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    for block in blocks:
        eager = find_eager_modules(block, fullgraph=fullgraph)
        for module in eager:
            replace_forward(module, torch.compiler.disable(module.forward))
        block.compile(fullgraph=fullgraph and not eager, dynamic=False, **options)


def find_eager_modules(block: nn.Module, *, fullgraph: bool) -> list[nn.Module]:
    """Return the modules that stay eager in a compiled block: those with `is_compiled = False`, such as experts, and
    without `fullgraph` attention."""
    return [
        module
        for module in block.modules()
        if not getattr(module, "is_compiled", True) or (not fullgraph and depends_on_batch(module))
    ]


def enable_symmetric_memory(mesh: Mesh, device: torch.device) -> None:
    """Enable torch's symmetric memory, by which tensor-parallel ranks read one another's memory. A collective.

    Raises UsageError on a CPU and if torch lacks it; MegatfmError, on all ranks, if it can't be opened.
    """
    if device.type != "cuda":
        raise UsageError(
            f"parallel.async_tp = true needs CUDA GPUs, which read one another's memory, but the device is "
            f"{device.type}: {HOW_TO_DISABLE}"
        )
    if not dist.is_nccl_available() or not find_spec("torch.distributed._symmetric_memory"):
        raise UsageError(
            f"parallel.async_tp = true: torch {torch.__version__} was built without NCCL, or has no symmetric "
            f"memory: install torch 2.11 or newer for CUDA, or {HOW_TO_DISABLE}"
        )
    run_on_all_ranks("parallel.async_tp = true", lambda: _open_symmetric_memory(mesh))


def _open_symmetric_memory(mesh: Mesh) -> None:
    from torch.distributed import _symmetric_memory as memory

    hosts_by_machine = dict(mesh.gather_objects((get_machine_name(), socket.gethostname()), (TENSOR,)))
    if len(hosts_by_machine) > 1:
        hosts = sorted(hosts_by_machine.values())
        raise MegatfmError(
            f"a group of {mesh.size(TENSOR)} tensor-parallel ranks spans {' and '.join(hosts)}, but ranks can only "
            f"read memory of their own machine: set a parallel.tp that divides its GPUs, or {HOW_TO_DISABLE}"
        )
    name = mesh.group(TENSOR).group_name
    with warnings.catch_warnings():
        # torch 2.13 calls this deprecated, but its pass still checks that it was called.
        warnings.simplefilter("ignore", FutureWarning)
        memory.enable_symm_mem_for_group(name)
    try:
        memory.get_symm_mem_workspace(name, min_size=1)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise MegatfmError(f"GPUs can't read one another's memory here ({reason}): {HOW_TO_DISABLE}") from error


def make_async_tp_options(autotune: bool) -> dict[str, Any]:
    """Return the options of torch.compile for async tensor parallelism."""
    tuning = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if autotune else {}
    return {**tuning, "_micro_pipeline_tp": True, "post_grad_custom_pre_pass": ASYNC_TP_PASS}


class _AsyncTPPass(CustomGraphPass):
    """Rewrites graphs of compiled blocks into the patterns of inductor's pass `_micro_pipeline_tp` (as in torchtitan).

    The patterns are matmuls right after an all-gather, or right before a reduce-scatter; inductor's pass replaces them
    by operators of torch's symmetric memory. Only the order of sums changes.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _aten.addmm.default and not node.kwargs and _is_gathered(node.args[1]):
                _split_addmm(node)
            elif node.target is _collectives.reduce_scatter_tensor.default:
                _merge_matmuls(node)
        for node in list(graph.nodes):
            if node.target in VIEWS:
                _collapse_views(node)
        for node in reversed(list(graph.nodes)):
            if node.target in (*VIEWS, _aten.add.Tensor, _aten.mm.default) and not node.users:
                graph.erase_node(node)

    def uuid(self) -> Any:
        """Return the key of cached graphs: they are compiled anew when this file changes."""
        return get_hash_for_files((__file__,))


ASYNC_TP_PASS = _AsyncTPPass()


def _collapse_views(node: Node) -> None:
    """Merge views of views: inductor's pass doesn't see a gather behind views that several matmuls share."""
    (inner, shape), value = node.args, node.meta["val"]
    while isinstance(inner, Node) and inner.target in VIEWS:
        inner = inner.args[0]
    if isinstance(inner, Node) and inner.meta["val"].shape == value.shape:
        node.replace_all_uses_with(inner)
    else:
        node.target, node.args = _aten.reshape.default, (inner, shape)


def _is_gathered(node: Any) -> bool:
    source = _skip_views(node)
    return source.target is _collectives.wait_tensor.default and _is_all_gather(source.args[0])


def _is_all_gather(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _collectives.all_gather_into_tensor.default


def _skip_views(node: Node) -> Node:
    while node.target in VIEWS:
        (node, _) = node.args  # type: ignore[assignment]
    return node


def _split_addmm(node: Node) -> None:
    """Split a matmul with bias, which inductor's pass doesn't know, into two. The view between them keeps inductor from
    fusing them again."""
    bias, left, right = node.args
    rows, width = node.meta["val"].shape
    with node.graph.inserting_before(node):
        product = _call(node.graph, _aten.mm.default, left, right)
        view = _call(node.graph, _aten.reshape.default, product, [1, rows, width])
        summed = _call(node.graph, _aten.add.Tensor, view, bias)
        node.replace_all_uses_with(_call(node.graph, _aten.reshape.default, summed, [rows, width]))
    node.graph.erase_node(node)


def _merge_matmuls(scattered: Node) -> None:
    """Merge a sum of matmuls, such as the input gradient of several projections, into one matmul of concatenated
    operands.

    It also accumulates the sum in the matmul's precision.
    """
    (summed, *arguments), graph = scattered.args, scattered.graph
    assert isinstance(summed, Node)
    products = list(_iter_addends(summed))
    if len(products) < 2 or any(product.target is not _aten.mm.default for product in products):
        return
    with graph.inserting_before(scattered):
        lefts, rights = ([product.args[i] for product in products] for i in (0, 1))
        left = _call(graph, _aten.cat.default, lefts, 1)
        right = _call(graph, _aten.cat.default, rights, 0)
        product = _call(graph, _aten.mm.default, left, right)
        if product.meta["val"].shape != summed.meta["val"].shape:
            product = _call(graph, _aten.reshape.default, product, list(summed.meta["val"].shape))
    scattered.args = (product, *arguments)


def _iter_addends(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum without other users, views skipped."""
    node = _skip_views(node)
    if node.target is _aten.add.Tensor and len(node.users) == 1 and not node.kwargs:
        for term in node.args:
            if not isinstance(term, Node) or term.meta["val"].shape != node.meta["val"].shape:
                yield node
                return
        for term in node.args:
            yield from _iter_addends(term)  # type: ignore[arg-type]
    else:
        yield node


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda argument: argument.meta["val"]))
    return node
