"""Sums over all elements of a model, each counted once, whatever axes cut a parameter and whoever holds copies."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatfm.ops.squares import sum_of_squares
from megatfm.parallel.layout import ModelLayout, TensorLayout
from megatfm.parallel.mesh import PIPELINE, Mesh, sort_axes


class GlobalNorm:
    """Sorts parameters by the axes over which ranks hold different blocks: sums are added up over these alone.

    sharded: whether each parameter's data axes cut it as well (ZeRO 1 to 3): the one meant for it, or with `copies`
    those of copies, too. counted: whether a parameter, which several pipeline ranks may hold, is this rank's to count.
    """

    def __init__(
        self,
        layout: ModelLayout,
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
        copies: bool = False,
        counted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._mesh, self._device, self.counted = mesh, device, counted
        axes = {name: _axes(placement, sharded, copies) for name, placement in layout.items()}
        # From the layout, which has the names of the whole model, so that all ranks know the same kinds.
        self.axis_sets = sorted(set(axes.values()))
        self.kind_of = {name: self.axis_sets.index(own) for name, own in axes.items()}

    def norm(self, tensors: Mapping[str, Tensor], found_inf: bool = False) -> Tensor:
        """√Σ t² over the blocks of a tensor each; NaN on all ranks that share a model, if one of them says so."""
        squares = torch.zeros(len(self.axis_sets), dtype=torch.float64, device=self._device)
        own: dict[int, list[Tensor]] = {}
        for name, tensor in tensors.items():
            if self.counted(name):
                own.setdefault(self.kind_of[name], []).append(tensor)
        for kind, blocks in own.items():
            squares[kind] = sum_of_squares(blocks)
        if found_inf:
            squares.fill_(torch.nan)
        return sum_by_axes(squares, self.axis_sets, self._mesh).sqrt()


def sum_by_axes(sums: Tensor, kinds: Sequence[Sequence[str]], mesh: Mesh) -> Tensor:
    """[kinds, …] → [...]: each kind added up over its axes, and then all kinds. A collective."""
    for axis in mesh.reduction_order:
        own = [i for i, axes in enumerate(kinds) if axis in axes]
        if own and mesh.size(axis) > 1:
            part = sums[own]
            mesh.all_reduce_(part, (axis,))
            sums[own] = part
    return sums.sum(0)


def all_reduce_partial_gradients(gradients: Mapping[str, Tensor], layout: ModelLayout, mesh: Mesh) -> None:
    """Complete, in place, the gradients of which each rank has a share: one collective for each set of axes."""
    partial: dict[tuple[str, ...], list[Tensor]] = {}
    for name, gradient in gradients.items():
        if axes := layout[name].partial_axes:
            partial.setdefault(axes, []).append(gradient)
    for axes, own in sorted(partial.items()):
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        mesh.all_reduce_(flat, axes)
        for gradient, total in zip(own, flat.split([g.numel() for g in own]), strict=True):
            gradient.copy_(total.view_as(gradient))


def clip_gradients(gradients: Mapping[str, Tensor], norm: float | Tensor, largest: float) -> None:
    """Scale gradients down, in place, to a global norm of at most `largest` (0: as they are). A norm that is a scalar
    on the device is not looked at: there gradients are multiplied by 1 that need not be smaller."""
    own = list(gradients.values())
    if not own or not largest:  # a pipeline rank may have none, where all is frozen
        return
    if isinstance(norm, Tensor):
        factor = torch.where(norm > largest, largest / (norm + 1e-6), 1.0)
        # One kernel takes many tensors only where the factor has their dtype.
        torch._foreach_mul_(own, factor.to(own[0].dtype))
    elif norm > largest:
        torch._foreach_mul_(own, largest / (norm + 1e-6))


def _axes(placement: TensorLayout, sharded: bool, copies: bool) -> tuple[str, ...]:
    data = (
        (placement.data_axes.shard, *(placement.data_axes.replicate_axes if copies else ()))
        if sharded
        else ()
    )
    return sort_axes({PIPELINE, *placement.axes, *data})
