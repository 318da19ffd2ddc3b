"""A backward pass in two parts: first the gradients of a stage's inputs, which another rank waits for, and later those
of its weights (Qi et al. 2023).

On the way from outputs to inputs, weights branch off: a product's backward leads to its input and to its weight. The
first part goes the way only, and keeps the gradients that arrive at nodes with branches; the second part goes on from
there into the branches. A weight with branches at several nodes (one that layers share), and one whose branch leaves no
such node (it lies where the inputs don't lead), get their gradients in the first part.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megatfm.parallel.backward_parts import under_way

WeightBackward = Callable[[], None]
NOT_ON_INPUT_PATH = None
"""Instead of a node on the way: an output that doesn't depend on any input."""


def backward_input(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Add gradients to the `.grad` of inputs; returns what is to be called once to do the same for all weights."""
    if not roots:
        return lambda: None
    if not inputs:
        return lambda: torch.autograd.backward(roots, gradients)
    tops = [root.grad_fn for root in roots if root.grad_fn is not None]
    parents = _parents(tops)
    leaves = {get_gradient_edge(tensor).node for tensor in inputs}
    branches: dict[Node, list[Tensor]] = defaultdict(list)
    at_once = list(inputs)
    for weight, nodes in _branching(tops, parents, leaves):
        (node,) = nodes if len(nodes) == 1 else (NOT_ON_INPUT_PATH,)
        if node is NOT_ON_INPUT_PATH:
            at_once.append(weight)
        else:
            branches[node].append(weight)
    arrived: dict[Node, Sequence[Tensor | None]] = {}
    hooks = [node.register_prehook(_keeper(arrived, node)) for node in branches]
    with under_way("inputs"):
        torch.autograd.backward(roots, gradients, inputs=at_once, retain_graph=True)
    for hook in hooks:
        hook.remove()

    # Up to torch 2.11 a Python object of an autograd Function's node doesn't keep the node: these do.
    owners = [get_gradient_edge(root) for root in roots if root.grad_fn is not None]

    def later() -> None:
        for node, weights in branches.items():
            edges = [(GradientEdge(node, i), g) for i, g in enumerate(arrived.pop(node)) if g is not None]
            with under_way("weights"):
                torch.autograd.backward([edge for edge, _ in edges], [g for _, g in edges], inputs=weights)
        owners.clear()

    return later


def _keeper(arrived: dict[Node, Sequence[Tensor | None]], node: Node) -> Callable[[Any], None]:
    def keep(gradients: Sequence[Tensor | None]) -> None:
        arrived[node] = tuple(gradients)

    return keep


def _parents(tops: Sequence[Node]) -> dict[Node, list[Node]]:
    """Of every node that backward passes from the tops reach."""
    found: dict[Node, list[Node]] = {top: [] for top in tops}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        # In one order on all ranks: what is on the way may send something.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            if child not in found:
                found[child] = []
                waiting.append(child)
            found[child].append(node)
    return found


def _branching(
    root_nodes: Sequence[Node], parents: dict[Node, list[Node]], leaves: set[Node]
) -> list[tuple[Tensor, frozenset[Node | None]]]:
    """Each weight, and the nodes on the way from which its branches leave."""
    input_path, waiting = set(leaves), list(leaves)
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in input_path:
                input_path.add(parent)
                waiting.append(parent)
    left = {node: len(above) for node, above in parents.items()}
    ready = [node for node, above in left.items() if not above]
    exit_nodes: dict[Node, frozenset[Node | None]] = {}
    found = []
    while ready:
        node = ready.pop()
        sources: set[Node | None] = {NOT_ON_INPUT_PATH} if node in root_nodes else set()
        for parent in parents[node]:
            sources |= {parent} if parent in input_path else exit_nodes[parent]
        exit_nodes[node] = frozenset(sources)
        if node not in leaves and hasattr(node, "variable"):
            found.append((node.variable, exit_nodes[node]))
        # In one order on all ranks: what is on the way may send something.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            left[child] -= 1
            if not left[child]:
                ready.append(child)
    return found
