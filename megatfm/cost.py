"""What a part of a model costs on a row: parts that differ from the rule say so in a method `cost`, this adds up.

The rule: each weight is multiplied once with every token that goes through the module; tables, whose weights have a
role, are only looked up. Whoever plans, cuts or describes a model reads this, and no list of parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

MEMORY = "encoder_tokens"
"""The input whose tokens cross-attention looks at."""


@dataclass(frozen=True)
class Tokens:
    """What goes through a part: so many tokens of a row. memory: tokens of the memory that cross-attention looks at.
    predicted: the share of the tokens that the objective predicts, where that is known."""

    n: float
    memory: float = 0.0
    predicted: float | None = None

    def of(self, n: float) -> Tokens:
        """The same of another number of tokens."""
        return replace(self, n=n)


@dataclass(frozen=True)
class Cost:
    """Multiplications in a forward pass over a row, and weights that it leaves out.

    products: of matrices with tokens. vectors: of other weights (norms, biases) with tokens. attention: between
    activations, for all pairs of tokens. seen: likewise, for the pairs that are seen. idle: weights that a token does
    not meet, as those of experts that were not chosen for it.
    """

    products: float = 0.0
    vectors: float = 0.0
    attention: float = 0.0
    seen: float = 0.0
    idle: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.products + other.products,
            self.vectors + other.vectors,
            self.attention + other.attention,
            self.seen + other.seen,
            self.idle + other.idle,
        )


def cost_of(module: Any, tokens: Tokens) -> Cost:
    """Of a module (of torch) and all in it."""
    said = getattr(module, "cost", None)
    found: Cost = said(tokens) if said is not None else by_rule(module, tokens)
    return found


def by_rule(module: Any, tokens: Tokens) -> Cost:
    """The same for a module that says nothing itself, or that differs in the number of tokens only."""
    roles = getattr(module, "roles", {})
    own = {key: p for key, p in module.named_parameters(recurse=False) if key not in roles}
    matrices = sum(p.numel() for p in own.values() if p.dim() > 1)
    others = sum(p.numel() for p in own.values() if p.dim() <= 1)
    return costs_of(module.children(), tokens) + Cost(matrices * tokens.n, others * tokens.n)


def costs_of(modules: Iterable[Any], tokens: Tokens) -> Cost:
    """The sum over modules through which the same tokens go."""
    return sum((cost_of(module, tokens) for module in modules), Cost())
