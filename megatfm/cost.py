"""Cost of a part of a model on a row: parts that differ from the rule say so in a method `cost`, this adds up.

The rule: each weight is multiplied once with every token that goes through the module; tables, whose weights have a
role, are only looked up. Planning, pipeline cuts and `describe` read this, and no list of parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

ENCODER_TOKENS = "encoder_tokens"
"""The input whose tokens cross-attention looks at."""


@dataclass(frozen=True)
class TokenCounts:
    """Input of a module: `n` tokens of a row. encoder_tokens: tokens of the memory of cross-attention. target_fraction:
    share of the tokens that the objective predicts; None if unknown."""

    n: float
    encoder_tokens: float = 0.0
    target_fraction: float | None = None

    def with_count(self, n: float) -> TokenCounts:
        """Return a copy with another number of tokens."""
        return replace(self, n=n)


@dataclass(frozen=True)
class Cost:
    """Multiplications in a forward pass over a row, and weights that it leaves out.

    matmul_macs: of matrices with tokens. vector_macs: of other weights (norms, biases) with tokens. attention_macs:
    between activations, for all pairs of tokens. visible_attention_macs: likewise, for the pairs that are seen.
    inactive_parameters: weights that a token does not meet, as those of experts that were not chosen for it.
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


def module_cost(module: Any, tokens: TokenCounts) -> Cost:
    """Return the cost of a module (of torch) and all in it."""
    cost_of = getattr(module, "cost", None)
    cost: Cost = cost_of(tokens) if cost_of is not None else default_cost(module, tokens)
    return cost


def default_cost(module: Any, tokens: TokenCounts) -> Cost:
    """Return the cost of a module without a method `cost`, from its parameters and children."""
    roles = getattr(module, "roles", {})
    parameters = {key: p for key, p in module.named_parameters(recurse=False) if key not in roles}
    matrices = sum(p.numel() for p in parameters.values() if p.dim() > 1)
    vectors = sum(p.numel() for p in parameters.values() if p.dim() <= 1)
    return total_cost(module.children(), tokens) + Cost(matrices * tokens.n, vectors * tokens.n)


def total_cost(modules: Iterable[Any], tokens: TokenCounts) -> Cost:
    """The sum over modules through which the same tokens go."""
    return sum((module_cost(module, tokens) for module in modules), Cost())
