"""Kernels of the imaginary GPU: stand-ins for fused attention, and torch's own graphs of compiled blocks.

Stand-ins for attention's kernels allocate and save as much, and count their runs. They are operators of their own, so
that compiled blocks call them, too.

Dynamo and AOTAutograd trace a block and divide it into two passes as they do for inductor, so saved tensors, graph
breaks and recompilations are those of a compiled run. Inductor's kernels need a real GPU. In their place, pointwise
operators and reductions between two others count as one kernel, and results that only it reads take no memory: both a
lower bound, as inductor does not fuse all of them.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from megatfm.imaginary.device import STAND_IN_NAMESPACE, ImaginaryGPU
from megatfm.imaginary.ledger import get_path_in_package
from megatfm.ops.attention import kernels

FUSED = ("fused", "varlen", "flex")
"""Kernels without a tensor of scores."""
FRAME = re.compile(r'File "(.+)", line (\d+)')
MAX_COMPILATIONS = 4096
"""Compilations of which torch keeps the reasons."""


# ------------------------------------------------------------------------------------------------ attention


@torch.library.custom_op(f"{STAND_IN_NAMESPACE}::attention", mutates_args=())
def attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, biases: Sequence[Tensor], kernel: str
) -> tuple[Tensor, Tensor]:
    """Stand-in for a fused kernel: return its output, whose heads of a token are neighbours, and for each query its
    log-sum-exp in float32."""
    rows, heads, length, _ = q_BNTH.shape
    out_BNTV = q_BNTH.new_empty(rows, length, heads, v_BKSV.shape[-1]).transpose(1, 2)
    return out_BNTV, q_BNTH.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.custom_op(f"{STAND_IN_NAMESPACE}::attention_backward", mutates_args=())
def attention_backward(
    gradient_BNTV: Tensor,
    inputs: Sequence[Tensor],
    out_BNTV: Tensor,
    lse_BNT: Tensor,
    needed: Sequence[bool],
    kernel: str,
) -> list[Tensor]:
    """Stand-in for its backward pass, which reads all of its arguments: return the gradients of needed inputs."""
    return [torch.empty_like(x) for x, is_needed in zip(inputs, needed, strict=True) if is_needed]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, biases, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *biases, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[3]]
    computed = iter(attention_backward(gradient, inputs, out, lse, needed, ctx.kernel))
    q, k, v, *biases = [next(computed) if is_needed else None for is_needed in needed]
    return q, k, v, biases, None


attention.register_fake(attention._init_fn)
attention_backward.register_fake(attention_backward._init_fn)
attention.register_autograd(_backward, setup_context=_save_for_backward)


@contextmanager
def replace_fused_attention() -> Iterator[None]:
    """Replace attention's fused kernels. Each run counts by the name of the kernel that a GPU would run."""
    stand_ins = dict(kernels.STAND_INS)
    kernels.STAND_INS.update({name: partial(_attend, name) for name in FUSED})
    try:
        yield
    finally:
        kernels.STAND_INS.clear()
        kernels.STAND_INS.update(stand_ins)


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    biases = [x for x in args if isinstance(x, Tensor)]
    out, _ = attention(q, k, v, biases, name)
    return out


# ------------------------------------------------------------------------------------------------ compiled blocks


@contextmanager
def compile_without_code(gpu: ImaginaryGPU) -> Iterator[None]:
    """Have `nn.Module.compile` compile modules up to their graphs. Inductor's options have no effect on these."""
    compile_module: Any = nn.Module.compile
    backend = partial(_make_graphs, gpu)  # one, so that blocks share what is compiled
    torch._dynamo.utils.set_compilation_metrics_limit(MAX_COMPILATIONS)

    def compile_to_graphs(module: nn.Module, *, mode: str = "", options: Any = None, **arguments: Any) -> None:
        compile_module(module, backend=backend, **arguments)

    nn.Module.compile = compile_to_graphs  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.compile = compile_module  # type: ignore[method-assign]


def _make_graphs(gpu: ImaginaryGPU, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Backend of torch.compile: divide a graph into two passes as for inductor, and interpret them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(_make_pass, gpu, ""),
        bw_compiler=partial(_make_pass, gpu, "backward of "),
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )(module, inputs)
    return compiled


def _make_pass(gpu: ImaginaryGPU, prefix: str, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    graph = _FusedPass(module, gpu, prefix)

    def run(arguments: list[Any]) -> Any:
        return graph.run_once(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _FusedPass(Interpreter):
    """A pass of a compiled graph. prefix: of the lines that own its tensors."""

    def __init__(self, module: GraphModule, gpu: ImaginaryGPU, prefix: str) -> None:
        super().__init__(module)
        self._gpu, self._fusion = gpu, Fusion(module.graph)
        self._lines = {node: prefix + line for node in module.graph.nodes if (line := find_line(node))}

    def run_once(self, arguments: list[Any]) -> Any:
        """Run the pass. arguments: emptied, so that each is freed after its last use."""
        try:
            return self.boxed_run(arguments)
        finally:
            self.env, self._gpu.memory.line = {}, ""

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        self._gpu.memory.line = self._lines.get(n, "")
        self._gpu.is_fusing = n not in self._fusion.separate
        try:
            result = super().run_node(n)
        finally:
            self._gpu.is_fusing = False
        if n in self._fusion.stored:
            self._gpu.track(result)
        if n in self._fusion.first:
            self._gpu.kernels[self._gpu.memory.phase, "fused"] += 1
        return result


class Fusion:
    """Operators that inductor may fuse in a graph.

    separate: operators with kernels of their own. stored: fused ones whose results another kernel reads. first: one
    operator of each fused kernel.
    """

    def __init__(self, graph: Graph) -> None:
        from torch._functorch.partitioners import get_default_op_list

        types = get_default_op_list()
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._views = {node for node in calls if types.is_view(node) or node.target is operator.getitem}
        fusible = [node for node in calls if node not in self._views and types.is_fusible(node)]
        self.separate = {node for node in calls if node not in self._views} - {*fusible}
        levels = self._count_separate_before(graph)
        kernels: dict[Node, int] = {}
        self.stored: set[Node] = set()
        for node in reversed(fusible):
            readers = self._find_readers(node)
            by_kernels = [kernels[reader] for reader in readers if reader in kernels]
            is_read_outside = len(by_kernels) < len(readers)
            # A result that only later kernels read is computed in the first of them.
            kernels[node] = min(by_kernels) if by_kernels and not is_read_outside else levels[node]
            if is_read_outside or any(kernel != kernels[node] for kernel in by_kernels):
                self.stored.add(node)
        self.first = self._find_first(fusible, kernels)

    def _count_separate_before(self, graph: Graph) -> dict[Node, int]:
        """Return how many separate operators lie before each node, on the longest way."""
        levels: dict[Node, int] = {}
        for node in graph.nodes:
            levels[node] = max((levels[x] + (x in self.separate) for x in node.all_input_nodes), default=0)
        return levels

    def _find_readers(self, node: Node) -> set[Node]:
        """Return the nodes that read a result, or a view of it."""
        readers: set[Node] = set()
        for user in node.users:
            readers |= self._find_readers(user) if user in self._views else {user}
        return readers

    def _find_first(self, fusible: Sequence[Node], kernels: dict[Node, int]) -> set[Node]:
        """Return the first operator of each group of neighbours in the same kernel."""
        group = {node: node for node in fusible}

        def find_root(node: Node) -> Node:
            while group[node] is not node:
                node = group[node]
            return node

        for node in fusible:
            for reader in self._find_readers(node):
                if reader in kernels and kernels[reader] == kernels[node]:
                    group[find_root(reader)] = find_root(node)
        return {node for node in fusible if find_root(node) is node}


def find_line(node: Node) -> str:
    """Return the innermost line of megatfm's code that a node was traced from; "" if there is none."""
    lines = [(get_path_in_package(file), line) for file, line in FRAME.findall(node.meta.get("stack_trace") or "")]
    return next((f"{path}:{line}" for path, line in reversed(lines) if path), "")


def list_compilations() -> tuple[dict[str, int], dict[str, int]]:
    """Return graph breaks and recompilations so far: "line: reason" → times."""
    breaks, recompilations = Counter[str](), Counter[str]()
    for broken in torch._dynamo.utils.graph_break_reasons:
        lines = [(get_path_in_package(frame.filename), frame.lineno) for frame in broken.user_stack]
        line = next((f"{path}:{number}" for path, number in reversed(lines) if path), "torch")
        breaks[f"{line}: {broken.reason.partition(chr(10))[0]}"] += 1
    for metrics in torch._dynamo.utils.get_compilation_metrics():
        if metrics.recompile_reason:
            path = get_path_in_package(metrics.co_filename or "") or "torch"
            reason = metrics.recompile_reason.strip().partition("\n")[0]
            recompilations[f"{path}:{metrics.co_firstlineno}: {reason}"] += 1
    return dict(breaks), dict(recompilations)
