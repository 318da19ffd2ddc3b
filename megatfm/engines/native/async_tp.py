"""Async tensor parallelism: what ranks send in pieces, each under way while the piece before is multiplied.

inductor's pass for it (`_micro_pipeline_tp`, which torchtitan turns on as well) takes products right behind a gather
or right before a reduce-scatter, and puts operators of torch's symmetric memory in their place. `PREPARE` brings the
graphs of compiled blocks into the forms that it knows. It changes values by nothing but the order of sums.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_aten, _sums = torch.ops.aten, torch.ops._c10d_functional
VIEWS = {_aten.view.default, _aten.reshape.default}


def compile_options(autotune: bool) -> dict[str, Any]:
    """What torch.compile is to be told."""
    tried = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if autotune else {}
    return {**tried, "_micro_pipeline_tp": True, "post_grad_custom_pre_pass": PREPARE}


class _Prepare(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _aten.addmm.default and not node.kwargs and _is_gathered(node.args[1]):
                _split_addmm(node)
            elif node.target is _sums.reduce_scatter_tensor.default:
                _merge_matmuls(node)
        for node in list(graph.nodes):
            if node.target in VIEWS:
                _collapse_views(node)
        for node in reversed(list(graph.nodes)):
            if node.target in (*VIEWS, _aten.add.Tensor, _aten.mm.default) and not node.users:
                graph.erase_node(node)

    def uuid(self) -> Any:
        """What compiled graphs are kept under: they are made anew when this file changes."""
        return get_hash_for_files((__file__,))


PREPARE = _Prepare()


def _collapse_views(node: Node) -> None:
    """A view of a view, which several products share, hides from the pass what was gathered."""
    (inner, shape), value = node.args, node.meta["val"]
    while isinstance(inner, Node) and inner.target in VIEWS:
        inner = inner.args[0]
    if isinstance(inner, Node) and inner.meta["val"].shape == value.shape:
        node.replace_all_uses_with(inner)
    else:
        node.target, node.args = _aten.reshape.default, (inner, shape)


def _is_gathered(node: Any) -> bool:
    whole = _without_views(node)
    return whole.target is _sums.wait_tensor.default and _gathers(whole.args[0])


def _gathers(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _sums.all_gather_into_tensor.default


def _without_views(node: Node) -> Node:
    while node.target in VIEWS:
        (node, _) = node.args  # type: ignore[assignment]
    return node


def _split_addmm(node: Node) -> None:
    """The pass knows products, but not those that add a bias. Behind a view, nothing puts the two together again."""
    bias, left, right = node.args
    rows, width = node.meta["val"].shape
    with node.graph.inserting_before(node):
        product = _call(node.graph, _aten.mm.default, left, right)
        apart = _call(node.graph, _aten.reshape.default, product, [1, rows, width])
        summed = _call(node.graph, _aten.add.Tensor, apart, bias)
        node.replace_all_uses_with(_call(node.graph, _aten.reshape.default, summed, [rows, width]))
    node.graph.erase_node(node)


def _merge_matmuls(scattered: Node) -> None:
    """The gradient to what several matrices multiplied is a sum of products, and the pass knows one: that of the
    gradients side by side with the matrices one below the other, which also adds them up in the product's precision."""
    (summed, *others), graph = scattered.args, scattered.graph
    assert isinstance(summed, Node)
    products = list(_addends(summed))
    if len(products) < 2 or any(each.target is not _aten.mm.default for each in products):
        return
    with graph.inserting_before(scattered):
        lefts, rights = ([each.args[i] for each in products] for i in (0, 1))
        left = _call(graph, _aten.cat.default, lefts, 1)
        right = _call(graph, _aten.cat.default, rights, 0)
        product = _call(graph, _aten.mm.default, left, right)
        if product.meta["val"].shape != summed.meta["val"].shape:
            product = _call(graph, _aten.reshape.default, product, list(summed.meta["val"].shape))
    scattered.args = (product, *others)


def _addends(node: Node) -> Iterator[Node]:
    """The terms of a sum that nothing else uses; views left out."""
    node = _without_views(node)
    if node.target is _aten.add.Tensor and len(node.users) == 1 and not node.kwargs:
        for each in node.args:
            if not isinstance(each, Node) or each.meta["val"].shape != node.meta["val"].shape:
                yield node
                return
        for each in node.args:
            yield from _addends(each)  # type: ignore[arg-type]
    else:
        yield node


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
    return node
