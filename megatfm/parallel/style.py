"""How a module runs under tensor parallelism: which dim of its weights is cut, and what travels around it.

A style is laid over any module from outside. With sequence parallelism, activations between the styles are sharded by
tokens; without, they are replicated.

The tokens of a micro-batch [B, T, ...] count through, row after row, and each rank has an equal part of them, whose
shape is [B, T/ranks, ...]: so parts lie in memory one after another, and neither a gather nor a scatter copies what it
sends or got. Where ranks divide rows a part is whole rows, else it begins or ends within one. So whatever runs on a
part must take each token by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.parallel.collectives import (
    copy_to_shards,
    gather_replicated,
    gather_shards,
    scatter_sum,
    sum_partial,
)
from megatfm.parallel.layout import Placement
from megatfm.parallel.mesh import Mesh

Own = Mapping[str, Placement]
"""The placements of a module's own tensors, by their names in it."""


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel group that styles work in."""

    group: ProcessGroup
    sequence_parallel: bool

    @property
    def rank(self) -> int:
        """This process's number within the group, not in the world."""
        return dist.get_rank(self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Residual stream → replicated input of cut weights."""
        if self.sequence_parallel:
            return _in_rows(gather_shards(x.flatten(0, 1), 0, self.group), x)
        return copy_to_shards(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial output of cut weights → residual stream."""
        if self.sequence_parallel:
            return _in_rows(scatter_sum(x.flatten(0, 1), 0, self.group), x)
        return sum_partial(x, self.group)

    def whole(self, x: Tensor) -> Tensor:
        """Residual stream → replicated, for what every rank computes alike."""
        if self.sequence_parallel:
            return _in_rows(gather_replicated(x.flatten(0, 1), 0, self.group), x)
        return x

    def own(self, x: Tensor) -> Tensor:
        """Replicated → residual stream; every rank keeps its part of the tokens."""
        if self.sequence_parallel:
            return _in_rows(x.flatten(0, 1).chunk(self.group.size())[self.rank], x)
        return x

    def row_sums(self, x_BTX: Tensor) -> Tensor:
        """Residual stream → sums [B, X] over the tokens of each row that are here."""
        if not self.sequence_parallel:
            return x_BTX.sum(1)
        rows, length = x_BTX.shape[:2]
        first = self.rank * rows * length
        numbers = torch.arange(first, first + rows * length, device=x_BTX.device)
        precise = torch.promote_types(x_BTX.dtype, torch.float32)
        sums_BX = torch.zeros(rows, x_BTX.shape[2], dtype=precise, device=x_BTX.device)
        rows_N = numbers // (length * self.group.size())
        return sums_BX.index_add(0, rows_N, x_BTX.flatten(0, 1).to(precise)).to(x_BTX.dtype)


def _in_rows(x: Tensor, like: Tensor) -> Tensor:
    """Tokens [N, ...] in as many rows as another tensor has."""
    return x.unflatten(0, (len(like), -1))


Install = Callable[[nn.Module, Ranks, Own], None]
PlacementRule = Callable[[Placement, Mesh], Placement]
InstallBeside = Callable[[nn.Module, Mesh, Own], None]


def _nothing(module: nn.Module, ranks: Ranks, own: Own) -> None:
    """Nothing travels."""


def _as_it_is(placement: Placement, mesh: Mesh) -> Placement:
    return placement


def _nothing_beside(module: nn.Module, mesh: Mesh, own: Own) -> None:
    """Nothing travels."""


Sends = Literal[
    "input gathered",  # residual stream to replicated input of cut weights
    "output gathered",
    "output summed",  # partial output of cut weights to residual stream
    "input whole",  # for what every rank computes alike
    "output whole",
    "parts summed",  # numbers for each token, over cut channels; of their gradient, too
    "loss summed",  # a sum over tokens
    "loss over the vocabulary",  # in the module's `loss`; of logits, if it gives these, the parts are gathered
]
"""What ranks send one another at a module's call; what its backward pass sends follows from it."""


@dataclass(frozen=True)
class Style:
    """dim: the dim of the module's own tensors that is cut; None: they are whole on every rank.

    gradient: of whole tensors. "whole": every rank computes all of it; "sequence": from its part of the residual
    stream, so a partial one with sequence parallelism; "partial": always its own share, e.g. that of its heads.
    uneven: the last part may be smaller. install: adds what travels; called only where there is more than one rank.
    place: what axes beside tensor parallelism do to a tensor (experts, cut over theirs), given what that has done.
    beside: adds what travels over these axes, before `install` does; called whatever their sizes are.
    shown: in the table also where it has no tensors. instead: the style for a module that this one does not fit.
    sends: in words of `Sends`, so that `megatfm verify` can say how much it should be; None: it can't.
    dims: the dim by a tensor's name, where it isn't the same for all; tensors without one are whole.
    by_expert_tp: other styles in its place under some values of `parallel.expert_tp`.
    """

    name: str
    dim: int | None = None
    gradient: Literal["whole", "sequence", "partial"] = "whole"
    uneven: bool = False
    install: Install = _nothing
    place: PlacementRule = _as_it_is
    beside: InstallBeside = _nothing_beside
    shown: bool = False
    instead: "Style | None" = None
    sends: tuple[Sends, ...] | None = None
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    by_expert_tp: "Mapping[str, Style] | None" = field(default=None, hash=False)

    def cut_dim(self, key: str, dims: int) -> int | None:
        """Of a tensor with so many dims; None where it is whole."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims

    def fitted(self, module: nn.Module, parts: int, expert_tp: str = "whole") -> "Style":
        """This style, or another: where the module's heads are fewer than the parts and divide them, or where experts
        are taken otherwise."""
        if self.by_expert_tp and parts > 1 and expert_tp in self.by_expert_tp:
            return self.by_expert_tp[expert_tp]
        heads = getattr(module, "heads", None)
        if self.instead and heads and heads % parts and parts % heads == 0:
            return self.instead
        return self
