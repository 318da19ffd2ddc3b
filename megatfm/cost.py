"""Cost of a model's forward pass on a row, summed over its modules.

By default, each weight of a module is multiplied once with every token; weights with a role, such as embedding tables,
are only looked up. A module that differs has a method `cost`. Pipeline splits, estimates and `describe` use this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

ENCODER_TOKENS = "encoder_tokens"
"""Name of the input whose tokens cross-attention attends to."""


@dataclass(frozen=True)
class TokenCounts:
    """Number of tokens that pass through a module.

    n: tokens of a row. encoder_tokens: encoder tokens that cross-attention attends to. target_fraction: fraction of
    tokens that the objective predicts; None if unknown.
    """

    n: float
    encoder_tokens: float = 0.0
    target_fraction: float | None = None

    def with_count(self, n: float) -> TokenCounts:
        """Return a copy with another number of tokens."""
        return replace(self, n=n)


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates of a forward pass over a row.

    matmul_macs: of weight matrices with tokens. vector_macs: of other weights (norms, biases) with tokens.
    attention_macs: between activations, over all pairs of tokens. visible_attention_macs: the same over the pairs that
    the mask allows. inactive_parameters: number of weights that a token doesn't use, such as those of experts to which
    it isn't routed.
    """

    matmul_macs: float = 0.0
    vector_macs: float = 0.0
    attention_macs: float = 0.0
    visible_attention_macs: float = 0.0
    inactive_parameters: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.matmul_macs + other.matmul_macs,
            self.vector_macs + other.vector_macs,
            self.attention_macs + other.attention_macs,
            self.visible_attention_macs + other.visible_attention_macs,
            self.inactive_parameters + other.inactive_parameters,
        )


def compute_module_cost(module: Any, tokens: TokenCounts) -> Cost:
    """Return the cost of a torch module with all of its submodules."""
    cost_method = getattr(module, "cost", None)
    cost: Cost = cost_method(tokens) if cost_method is not None else default_cost(module, tokens)
    return cost


def default_cost(module: Any, tokens: TokenCounts) -> Cost:
    """Return the cost of a module without a method `cost`, from its parameters and children."""
    roles = getattr(module, "roles", {})
    parameters = {key: p for key, p in module.named_parameters(recurse=False) if key not in roles}
    matrices = sum(p.numel() for p in parameters.values() if p.dim() > 1)
    vectors = sum(p.numel() for p in parameters.values() if p.dim() <= 1)
    return sum_costs(module.children(), tokens) + Cost(matrices * tokens.n, vectors * tokens.n)


def sum_costs(modules: Iterable[Any], tokens: TokenCounts) -> Cost:
    """Return the total cost of modules through which the same tokens pass."""
    return sum((compute_module_cost(module, tokens) for module in modules), Cost())
