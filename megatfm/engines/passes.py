"""Forward and backward passes of micro-batches: one after another, and the backward pass in two parts.

Pipelines take the backward pass in two (Qi et al. 2023): first the gradients of a stage's inputs, which another rank
waits for, and later those of its weights. On the path from outputs to inputs, weights branch off: a product's backward
leads to its input and to its weight. The first part follows the path alone, and saves the gradients that arrive at
nodes with branches; the second part goes on from there into the branches. A weight with branches at several nodes (one
that layers share), and one whose branch leaves no such node (it lies where the inputs don't lead), get their gradients
in the first part.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megatfm.engines.interface import Batch, ComparingLoss, Features, LossFunction, compares_samples
from megatfm.parallel.pipeline_schedule import under_way

Terms = dict[str, Tensor]
LossScaler = Callable[[Terms], Tensor]
"""Maps the terms of a micro-batch to its share of the global batch's loss, a scalar."""


class GradientSync(Protocol):
    """Receives the start of each micro-batch, to decide whether its backward pass reduces gradients."""

    def begin(self, is_last: bool) -> None:
        """Called before the forward pass of each micro-batch. is_last: of this step, so that what is accumulated is
        reduced."""

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Called instead of `begin`, once a step, where the passes of micro-batches take turns; gradients are reduced
        at its end. keep_unsharded: weights must stay as they are between the parts of a backward pass."""


class ForwardBackward(Protocol):
    """One way to run forward and backward passes."""

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        """Add the gradients of all micro-batches up; returns the terms that were computed here."""

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """The terms of one micro-batch that are computed here."""


class SequentialForwardBackward:
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        if compares_samples(objective) and len(batches) > 1:
            return [step_in_two_passes(self._model, batches, objective, scale_loss, data)]
        terms_by_batch = []
        for batch in batches:
            data.begin(is_last=batch is batches[-1])
            terms = objective(self._model, batch)
            scale_loss(terms).backward()
            terms_by_batch.append({name: term.detach() for name, term in terms.items()})
        return terms_by_batch

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        return objective(self._model, batch)


def step_in_two_passes(
    model: nn.Module,
    batches: Sequence[Batch],
    objective: ComparingLoss,
    scale_loss: LossScaler,
    data: GradientSync,
) -> Terms:
    """Add the gradients of micro-batches up whose samples are compared with one another (GradCache; Gao et al. 2021).

    First all features without a graph, then the loss and their gradients, then each micro-batch again, which passes
    these on. Dropout is keyed by sample, so that both passes compute the same. Returns the terms.
    """
    with torch.no_grad():
        features = joined_features([objective.features(model, batch) for batch in batches])
    inputs = {name: x.detach().requires_grad_() for name, x in features.items() if x.is_floating_point()}
    terms = objective.terms_of(model, features | inputs)
    scale_loss(terms).backward()
    starts = dict.fromkeys(inputs, 0)
    for batch in batches:
        data.begin(is_last=batch is batches[-1])
        again = {name: x for name, x in objective.features(model, batch).items() if name in inputs}
        gradients = []
        for name, x in again.items():
            gradient = cast(Tensor, inputs[name].grad)
            if name in NUMBERS:  # the same in all micro-batches: the first one passes its gradient on
                gradients.append(gradient if batch is batches[0] else torch.zeros_like(gradient))
            else:
                gradients.append(gradient[starts[name] : starts[name] + len(x)])
                starts[name] += len(x)
        torch.autograd.backward(list(again.values()), gradients)
    return {name: term.detach() for name, term in terms.items()}


NUMBERS = ("scale", "bias")
"""Features that are numbers of the model, not of samples."""


def joined_features(features: Sequence[Features]) -> Features:
    """Return the features of micro-batches as those of one."""
    return {
        name: x if name in NUMBERS else torch.cat([part[name] for part in features])
        for name, x in features[0].items()
    }


WeightBackward = Callable[[], None]
NOT_ON_INPUT_PATH = None
"""Stands for a node on the path, where an output doesn't depend on any input."""


def backward_input(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Add gradients to the `.grad` of inputs; returns what is to be called once to do the same for all weights."""
    if not roots:
        return lambda: None
    if not inputs:
        return lambda: torch.autograd.backward(roots, gradients)
    root_nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    parents = _parents(root_nodes)
    leaves = {get_gradient_edge(tensor).node for tensor in inputs}
    branches: dict[Node, list[Tensor]] = defaultdict(list)
    at_once = list(inputs)
    for weight, nodes in _branching(root_nodes, parents, leaves):
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

    def backward_weights() -> None:
        for node, weights in branches.items():
            edges = [(GradientEdge(node, i), g) for i, g in enumerate(arrived.pop(node)) if g is not None]
            with under_way("weights"):
                torch.autograd.backward([edge for edge, _ in edges], [g for _, g in edges], inputs=weights)
        owners.clear()

    return backward_weights


def _keeper(arrived: dict[Node, Sequence[Tensor | None]], node: Node) -> Callable[[Any], None]:
    def keep(gradients: Sequence[Tensor | None]) -> None:
        arrived[node] = tuple(gradients)

    return keep


def _parents(root_nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Parents of every node that a backward pass from the roots reaches."""
    parents: dict[Node, list[Node]] = {root: [] for root in root_nodes}
    waiting = list(parents)
    while waiting:
        node = waiting.pop()
        # In one order on all ranks: what is on the path may send something.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    return parents


def _branching(
    root_nodes: Sequence[Node], parents: dict[Node, list[Node]], leaves: set[Node]
) -> list[tuple[Tensor, frozenset[Node | None]]]:
    """Pair each weight with the nodes on the path from which its branches leave."""
    input_path, waiting = set(leaves), list(leaves)
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in input_path:
                input_path.add(parent)
                waiting.append(parent)
    unvisited = {node: len(above) for node, above in parents.items()}
    ready = [node for node, above in unvisited.items() if not above]
    exit_nodes: dict[Node, frozenset[Node | None]] = {}
    branching = []
    while ready:
        node = ready.pop()
        sources: set[Node | None] = {NOT_ON_INPUT_PATH} if node in root_nodes else set()
        for parent in parents[node]:
            sources |= {parent} if parent in input_path else exit_nodes[parent]
        exit_nodes[node] = frozenset(sources)
        if node not in leaves and hasattr(node, "variable"):
            branching.append((node.variable, exit_nodes[node]))
        # In one order on all ranks: what is on the path may send something.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            unvisited[child] -= 1
            if not unvisited[child]:
                ready.append(child)
    return branching
