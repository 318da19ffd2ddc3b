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
    all_gather,
    all_gather_replicated,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
)
from megatfm.parallel.layout import TensorLayout
from megatfm.parallel.mesh import Mesh

layouts = Mapping[str, TensorLayout]
"""The placements of a module's own tensors, by their names in it."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """The tensor-parallel group that styles work in."""

    group: ProcessGroup
    sequence_parallel: bool

    @property
    def rank(self) -> int:
        """This process's number within the group, not in the world."""
        return dist.get_rank(self.group)

    def gather_input(self, x: Tensor) -> Tensor:
        """Residual stream → replicated input of cut weights."""
        if self.sequence_parallel:
            return _in_rows(all_gather(x.flatten(0, 1), 0, self.group), x)
        return copy_to_group(x, self.group)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Partial output of cut weights → residual stream."""
        if self.sequence_parallel:
            return _in_rows(reduce_scatter(x.flatten(0, 1), 0, self.group), x)
        return reduce_from_group(x, self.group)

    def gather_replicated(self, x: Tensor) -> Tensor:
        """Residual stream → replicated, for what every rank computes alike."""
        if self.sequence_parallel:
            return _in_rows(all_gather_replicated(x.flatten(0, 1), 0, self.group), x)
        return x

    def split_tokens(self, x: Tensor) -> Tensor:
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


Install = Callable[[nn.Module, TensorParallelGroup, layouts], None]
PlacementRule = Callable[[TensorLayout, Mesh], TensorLayout]
InstallBeside = Callable[[nn.Module, Mesh, layouts], None]


def _nothing(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    """Nothing travels."""


def _as_it_is(placement: TensorLayout, mesh: Mesh) -> TensorLayout:
    return placement


def _nothing_beside(module: nn.Module, mesh: Mesh, own: layouts) -> None:
    """Nothing travels."""


Communication = Literal[
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
class ParallelStyle:
    """dim: the dim of the module's own tensors that is cut; None: they are whole on every rank.

    gradient: of whole tensors. "whole": every rank computes all of it; "sequence": from its part of the residual
    stream, so a partial one with sequence parallelism; "partial": always its own share, e.g. that of its heads.
    allows_uneven: the last part may be smaller. apply: adds what travels; called only where there is more than one
    rank. shard_experts: what axes beside tensor parallelism do to a tensor (experts, cut over theirs), given what that
    has done. apply_expert_parallel: adds what travels over these axes, before `apply` does; called whatever their sizes
    are. is_listed: in the table also where it has no tensors. fallback: the style for a module that this one does not
    fit. communication: in words of `Communication`, so that `megatfm verify` can say how much it should be; None: it
    can't.
    dims: the dim by a tensor's name, where it isn't the same for all; tensors without one are whole.
    expert_tp_overrides: other styles in its place under some values of `parallel.expert_tp`.
    """

    name: str
    dim: int | None = None
    gradient: Literal["whole", "sequence", "partial"] = "whole"
    allows_uneven: bool = False
    apply: Install = _nothing
    shard_experts: PlacementRule = _as_it_is
    apply_expert_parallel: InstallBeside = _nothing_beside
    is_listed: bool = False
    fallback: "ParallelStyle | None" = None
    communication: tuple[Communication, ...] | None = None
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    expert_tp_overrides: "Mapping[str, ParallelStyle] | None" = field(default=None, hash=False)

    def cut_dim(self, key: str, dims: int) -> int | None:
        """Of a tensor with so many dims; None where it is whole."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims

    def resolve(self, module: nn.Module, parts: int, expert_tp: str = "by_expert") -> "ParallelStyle":
        """This style, or another: where the module's heads are fewer than the parts and divide them, or where experts
        are taken otherwise."""
        if self.expert_tp_overrides and parts > 1 and expert_tp in self.expert_tp_overrides:
            return self.expert_tp_overrides[expert_tp]
        heads = getattr(module, "heads", None)
        if self.fallback and heads and heads % parts and parts % heads == 0:
            return self.fallback
        return self
