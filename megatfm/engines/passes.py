"""Forward and backward passes of micro-batches: one after another, and the backward pass in two parts.

Pipelines take the backward pass in two (Qi et al. 2023): first the gradients of a stage's inputs, which another rank
waits for, and later those of its weights. Weights branch off the path from outputs to inputs: the backward node of a
matmul leads to its input and to its weight. The first part follows the path alone, and saves the gradients that arrive
at nodes with branches; the second part continues from there into the branches. The first part also computes the
gradients of weights that branch off at several nodes (layers share them), or at none (the inputs don't lead there).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megatfm.engines.interface import Batch, ComparingLoss, Features, LossFunction, compares_samples
from megatfm.parallel.pipeline_schedule import mark_backward_part

Terms = dict[str, Tensor]
LossScaler = Callable[[Terms], Tensor]
"""Maps the terms of a micro-batch to its share of the global batch's loss, a scalar."""


class GradientSync(Protocol):
    """Decides at the start of each micro-batch whether its backward pass reduces gradients."""

    def start_microbatch(self, is_last: bool) -> None:
        """Called before the forward pass of each micro-batch. is_last: the step has no further one, so that accumulated
        gradients are reduced."""

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Called once a step, instead of `start_microbatch`, by pipelines, whose passes take turns; gradients are
        reduced at the end of the step. keep_unsharded: weights stay gathered between the two parts of a backward
        pass."""


class ForwardBackward(Protocol):
    """One way to run forward and backward passes."""

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, gradient_sync: GradientSync
    ) -> list[Terms]:
        """Accumulate the gradients of all micro-batches; returns the terms of each that this rank computed."""

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """Return the terms of one micro-batch that this rank computes."""


class SequentialForwardBackward:
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, gradient_sync: GradientSync
    ) -> list[Terms]:
        if compares_samples(objective) and len(batches) > 1:
            return [step_in_two_passes(self._model, batches, objective, scale_loss, gradient_sync)]
        terms_by_batch = []
        for batch in batches:
            gradient_sync.start_microbatch(is_last=batch is batches[-1])
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
    gradient_sync: GradientSync,
) -> Terms:
    """Accumulate gradients of micro-batches whose samples are compared with one another (GradCache; Gao et al. 2021).

    The first pass computes all features without a graph, then the loss and the features' gradients. The second pass
    runs each micro-batch again and hands it these gradients. Dropout is keyed by sample, so both passes compute the
    same. Returns the terms.
    """
    with torch.no_grad():
        features = [objective.features(model, batch) for batch in batches]
    gradients = FeatureGradients(model, features, objective, scale_loss)
    for index, batch in enumerate(batches):
        gradient_sync.start_microbatch(is_last=batch is batches[-1])
        outputs = objective.features(model, batch)
        feature_gradients = gradients.get_gradients(index)
        torch.autograd.backward([outputs[name] for name in feature_gradients], list(feature_gradients.values()))
    return gradients.terms


class FeatureGradients:
    """Terms of all samples of a step, and the gradients of its micro-batches' features.

    features: of each micro-batch, without a graph.
    """

    def __init__(
        self, model: nn.Module, features: Sequence[Features], objective: ComparingLoss, scale_loss: LossScaler
    ) -> None:
        joined = concatenate_features(features)
        inputs = {name: x.detach().requires_grad_() for name, x in joined.items() if x.is_floating_point()}
        terms = objective.compute_terms(model, joined | inputs)
        scale_loss(terms).backward()
        self.terms = {name: term.detach() for name, term in terms.items()}
        self._gradients: list[dict[str, Tensor]] = [{} for _ in features]
        for name, x in inputs.items():
            gradient = cast(Tensor, x.grad)
            if name in MODEL_SCALARS:  # shared by all micro-batches: their gradient goes to the first
                by_microbatch = [gradient, *(torch.zeros_like(gradient) for _ in features[1:])]
            else:
                by_microbatch = list(gradient.split([len(microbatch[name]) for microbatch in features]))
            for feature_gradients, microbatch_gradient in zip(self._gradients, by_microbatch, strict=True):
                feature_gradients[name] = microbatch_gradient

    def get_gradients(self, index: int) -> dict[str, Tensor]:
        """Return the gradients of a micro-batch's features."""
        return self._gradients[index]


class FeatureObjective:
    """Adapts an objective that compares samples to a pipeline, whose passes see one micro-batch and so have no loss.

    In the stage that computes the features, a call stores them in `features`. If it has their gradients, it returns a
    term with these gradients instead.
    """

    def __init__(
        self, objective: ComparingLoss, batches: Sequence[Batch], gradients: FeatureGradients | None = None
    ) -> None:
        self._objective, self._batches, self._gradients = objective, batches, gradients
        self.features: Features | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        computed: list[str] = []

        def run_model(**inputs: Tensor) -> Any:
            output = model(**inputs)
            computed.extend(output.predictions)
            return output

        features = self._objective.features(cast(nn.Module, run_model), batch)
        if not computed:
            return {}
        if self._gradients is None:
            self.features = features
            return {}
        index = next(i for i, candidate in enumerate(self._batches) if candidate is batch)
        gradients = self._gradients.get_gradients(index)
        products = [(features[name] * gradient).sum() for name, gradient in gradients.items()]
        return {FEATURES: sum(products[1:], products[0])}


FEATURES = "features"
"""The only term of `FeatureObjective`."""


def take_feature_term(terms: Terms) -> Tensor:
    """Return the term of `FeatureObjective`, whose gradients are scaled already."""
    return terms[FEATURES]


MODEL_SCALARS = ("scale", "bias")
"""Features that belong to the model, not to samples."""


def concatenate_features(features: Sequence[Features]) -> Features:
    """Concatenate the features of micro-batches along samples."""
    return {
        name: x if name in MODEL_SCALARS else torch.cat([microbatch[name] for microbatch in features])
        for name, x in features[0].items()
    }


WeightBackward = Callable[[], None]
NOT_ON_INPUT_PATH = None
"""Stands for the node on the path where a weight branches off an output that depends on no input."""


def backward_input(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Add gradients to the `.grad` of inputs; returns a function, to be called once, that does so for all weights.

    roots: outputs. gradients: theirs, None for a scalar loss. inputs: leaves.
    """
    if not roots:
        return lambda: None
    if not inputs:
        return lambda: torch.autograd.backward(roots, gradients)
    root_nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    parents = _find_parents(root_nodes)
    leaves = {get_gradient_edge(tensor).node for tensor in inputs}
    branches: dict[Node, list[Tensor]] = defaultdict(list)
    first_part = list(inputs)
    for weight, nodes in _find_branch_nodes(root_nodes, parents, leaves):
        (node,) = nodes if len(nodes) == 1 else (NOT_ON_INPUT_PATH,)
        if node is NOT_ON_INPUT_PATH:
            first_part.append(weight)
        else:
            branches[node].append(weight)
    saved: dict[Node, Sequence[Tensor | None]] = {}
    hooks = [node.register_prehook(_save_gradients(saved, node)) for node in branches]
    with mark_backward_part("inputs"):
        torch.autograd.backward(roots, gradients, inputs=first_part, retain_graph=True)
    for hook in hooks:
        hook.remove()

    # Up to torch 2.11 the Python object of an autograd Function's node doesn't keep the node alive: edges do.
    root_edges = [get_gradient_edge(root) for root in roots if root.grad_fn is not None]

    def backward_weights() -> None:
        for node, weights in branches.items():
            edges = [(GradientEdge(node, i), g) for i, g in enumerate(saved.pop(node)) if g is not None]
            with mark_backward_part("weights"):
                torch.autograd.backward([edge for edge, _ in edges], [g for _, g in edges], inputs=weights)
        root_edges.clear()

    return backward_weights


def _save_gradients(saved: dict[Node, Sequence[Tensor | None]], node: Node) -> Callable[[Any], None]:
    def hook(gradients: Sequence[Tensor | None]) -> None:
        saved[node] = tuple(gradients)

    return hook


def _find_parents(root_nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the parents of every node that a backward pass from the roots reaches."""
    parents: dict[Node, list[Node]] = {root: [] for root in root_nodes}
    pending = list(parents)
    while pending:
        node = pending.pop()
        # In one order on all ranks: a node on the path may communicate.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            if child not in parents:
                parents[child] = []
                pending.append(child)
            parents[child].append(node)
    return parents


def _find_branch_nodes(
    root_nodes: Sequence[Node], parents: dict[Node, list[Node]], leaves: set[Node]
) -> list[tuple[Tensor, frozenset[Node | None]]]:
    """Pair each weight with the nodes on the path from which its branches leave."""
    input_path, pending = set(leaves), list(leaves)
    while pending:
        for parent in parents.get(pending.pop(), ()):
            if parent not in input_path:
                input_path.add(parent)
                pending.append(parent)
    n_unvisited = {node: len(node_parents) for node, node_parents in parents.items()}
    ready = [node for node, count in n_unvisited.items() if not count]
    exit_nodes: dict[Node, frozenset[Node | None]] = {}
    branch_nodes = []
    while ready:
        node = ready.pop()
        sources: set[Node | None] = {NOT_ON_INPUT_PATH} if node in root_nodes else set()
        for parent in parents[node]:
            sources |= {parent} if parent in input_path else exit_nodes[parent]
        exit_nodes[node] = frozenset(sources)
        if node not in leaves and hasattr(node, "variable"):
            branch_nodes.append((node.variable, exit_nodes[node]))
        # In one order on all ranks: a node on the path may communicate.
        for child in dict.fromkeys(child for child, _ in node.next_functions if child is not None):
            n_unvisited[child] -= 1
            if not n_unvisited[child]:
                ready.append(child)
    return branch_nodes
