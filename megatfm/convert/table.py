"""Tables of rules between our tensors and theirs, as plain data that reads both ways."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatfm.errors import MegatfmError

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors, not copies: the transform of a rule that only renames."""
    return tensors


@dataclass(frozen=True)
class WeightMapping:
    """Some tensors of ours and the same numbers as theirs.

    to_hf: ours → theirs; from_hf: theirs → ours; both linear, so that they convert gradients as well. tied_names:
    further names under which their files may hold the (only) tensor of `theirs`; they are checked when read, never
    written.
    """

    megatfm: tuple[str, ...]
    hf: tuple[str, ...]
    to_hf: Transform = identity
    from_hf: Transform = identity
    tied_names: tuple[str, ...] = ()


def rename(ours: str, theirs: str, *, copies: Iterable[str] = ()) -> WeightMapping:
    """Another name and nothing else."""
    return WeightMapping((ours,), (theirs,), tied_names=tuple(copies))


def rename_linear(ours: str, theirs: str, *, bias: bool = False) -> list[WeightMapping]:
    """A matrix and its bias, if it has one; norms and tables are named alike."""
    return [rename(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", *["bias"] * bias)]


def transpose(ours: str, theirs: str) -> WeightMapping:
    """A matrix that they store as [d_in, d_out] (transformers' Conv1D)."""
    return WeightMapping((ours,), (theirs,), _transpose, _transpose)


def concat(
    ours: Sequence[str], theirs: str, sizes: Sequence[int], *, transpose: bool = False
) -> WeightMapping:
    """Tensors of ours, with `sizes` rows each, below one another in one of theirs; transpose: as [d_in, d_out]."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim=0)
        return [joined.T if transpose else joined]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return (tensors[0].T if transpose else tensors[0]).split(list(sizes), dim=0)

    return WeightMapping(tuple(ours), (theirs,), forth, back)


def with_prefix(ours: str, theirs: str, rules: Iterable[WeightMapping]) -> list[WeightMapping]:
    """The rules with a prefix before each name."""
    return [
        replace(
            rule,
            megatfm=tuple(ours + name for name in rule.megatfm),
            hf=tuple(theirs + name for name in rule.hf),
            tied_names=tuple(theirs + name for name in rule.tied_names),
        )
        for rule in rules
    ]


def per_layer(n: int, ours: str, theirs: str, rules: Sequence[WeightMapping]) -> list[WeightMapping]:
    """The rules of one block for each of n blocks: `decoder.layers.` and `model.layers.`, then number and dot."""
    return [rule for i in range(n) for rule in with_prefix(f"{ours}{i}.", f"{theirs}{i}.", rules)]


def to_hf(rules: Iterable[WeightMapping], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors (or gradients) of ours under their names. Raises MegatfmError where a rule's tensor is missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.hf, rule.to_hf(_take(rule.megatfm, ours)), strict=True)
    }


def from_hf(rules: Iterable[WeightMapping], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs under our names. Raises MegatfmError where a rule's tensor is missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.megatfm, rule.from_hf(_take(rule.hf, theirs)), strict=True)
    }


def _take(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    for name in names:
        if name not in tensors:
            raise MegatfmError(f"there is no tensor {name}")
    return [tensors[name] for name in names]


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].T]
