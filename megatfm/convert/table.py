"""Tables of rules between our tensors and theirs, as plain data that reads both ways."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatfm.errors import MegatfmError

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def unchanged(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors, not copies: the transform of a rule that only renames."""
    return tensors


@dataclass(frozen=True)
class Rule:
    """Some tensors of ours and the same numbers as theirs.

    forth: ours → theirs; back: theirs → ours; both linear, so that they convert gradients as well. copies: further
    names under which their files may hold the (only) tensor of `theirs`; they are checked when read, never written.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    forth: Transform = unchanged
    back: Transform = unchanged
    copies: tuple[str, ...] = ()


def same(ours: str, theirs: str, *, copies: Iterable[str] = ()) -> Rule:
    """Another name and nothing else."""
    return Rule((ours,), (theirs,), copies=tuple(copies))


def linear(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    """A matrix and its bias, if it has one; norms and tables are named alike."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", *["bias"] * bias)]


def transposed(ours: str, theirs: str) -> Rule:
    """A matrix that they store as [d_in, d_out] (transformers' Conv1D)."""
    return Rule((ours,), (theirs,), _transpose, _transpose)


def fused(ours: Sequence[str], theirs: str, sizes: Sequence[int], *, transpose: bool = False) -> Rule:
    """Tensors of ours, with `sizes` rows each, below one another in one of theirs; transpose: as [d_in, d_out]."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim=0)
        return [joined.T if transpose else joined]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return (tensors[0].T if transpose else tensors[0]).split(list(sizes), dim=0)

    return Rule(tuple(ours), (theirs,), forth, back)


def under(ours: str, theirs: str, rules: Iterable[Rule]) -> list[Rule]:
    """The rules with a prefix before each name."""
    return [
        replace(
            rule,
            ours=tuple(ours + name for name in rule.ours),
            theirs=tuple(theirs + name for name in rule.theirs),
            copies=tuple(theirs + name for name in rule.copies),
        )
        for rule in rules
    ]


def layers(n: int, ours: str, theirs: str, rules: Sequence[Rule]) -> list[Rule]:
    """The rules of one block for each of n blocks: `decoder.layers.` and `model.layers.`, then number and dot."""
    return [rule for i in range(n) for rule in under(f"{ours}{i}.", f"{theirs}{i}.", rules)]


def to_theirs(rules: Iterable[Rule], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors (or gradients) of ours under their names. Raises MegatfmError where a rule's tensor is missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.theirs, rule.forth(_take(rule.ours, ours)), strict=True)
    }


def to_ours(rules: Iterable[Rule], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs under our names. Raises MegatfmError where a rule's tensor is missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.ours, rule.back(_take(rule.theirs, theirs)), strict=True)
    }


def _take(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    for name in names:
        if name not in tensors:
            raise MegatfmError(f"there is no tensor {name}")
    return [tensors[name] for name in names]


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].T]
