"""Gradients over all ranks: global norm, clipping, reduction of partial gradients, and layer statistics.

Each element of the model counts once, however its parameter is sharded or replicated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.ops.squares import sum_of_squares
from megatfm.parallel.layout import ModelLayout, TensorLayout, transformer_blocks
from megatfm.parallel.mesh import AXES, PIPELINE, Mesh, sort_axes


class GlobalNorm:
    """Computes norms over all elements of the model, reducing each parameter over the axes that shard it.

    sharded: whether data axes shard parameters too (ZeRO 1 to 3): the shard axis, and with `copies` the replica axes
    as well. is_counted: name → whether this rank counts a parameter that several pipeline ranks hold.
    """

    def __init__(
        self,
        layout: ModelLayout,
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
        copies: bool = False,
        is_counted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._mesh, self._device, self.counted = mesh, device, is_counted
        axes = {name: _axes(placement, sharded, copies) for name, placement in layout.items()}
        # From the layout, which lists the full model, so that all ranks have the same axis sets.
        self.axis_sets = sorted(set(axes.values()))
        self.kind_of = {name: self.axis_sets.index(reduced_axes) for name, reduced_axes in axes.items()}

    def norm(self, tensors: Mapping[str, Tensor], found_inf: bool = False) -> Tensor:
        """√Σ t² over the blocks of all ranks, a scalar. found_inf: make it NaN; NaN on one rank is NaN on all."""
        squares = torch.zeros(len(self.axis_sets), dtype=torch.float64, device=self._device)
        blocks_by_kind: dict[int, list[Tensor]] = {}
        for name, tensor in tensors.items():
            if self.counted(name):
                blocks_by_kind.setdefault(self.kind_of[name], []).append(tensor)
        for kind, blocks in blocks_by_kind.items():
            squares[kind] = sum_of_squares(blocks)
        if found_inf:
            squares.fill_(torch.nan)
        return sum_by_axes(squares, self.axis_sets, self._mesh).sqrt()


def sum_by_axes(sums: Tensor, kinds: Sequence[Sequence[str]], mesh: Mesh) -> Tensor:
    """[kinds, …] → […]: sum each kind over its axes, then sum over kinds. A collective."""
    rows = list(
        sums.unbind(0)
    )  # an index that is a list of numbers would be copied to the device, and waited for
    for axis in mesh.reduction_order:
        summed = [i for i, axes in enumerate(kinds) if axis in axes]
        if summed and mesh.size(axis) > 1:
            part = torch.stack([rows[i] for i in summed])
            mesh.all_reduce_(part, (axis,))
            for i, total in zip(summed, part.unbind(0), strict=True):
                rows[i] = total
    return torch.stack(rows).sum(0)


def all_reduce_partial_gradients(gradients: Mapping[str, Tensor], layout: ModelLayout, mesh: Mesh) -> None:
    """Sum partial gradients over their axes, in place: one collective for each set of axes."""
    partial: dict[tuple[str, ...], list[Tensor]] = {}
    for name, gradient in gradients.items():
        if axes := layout[name].partial_axes:
            partial.setdefault(axes, []).append(gradient)
    for axes, shares in sorted(partial.items()):
        all_reduce_flat(shares, lambda flat, axes=axes: mesh.all_reduce_(flat, axes))  # type: ignore[misc]


def all_reduce_flat(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], None]) -> None:
    """Reduce tensors in place by one call of `all_reduce` on a flat buffer; none without tensors."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def clip_gradients(gradients: Mapping[str, Tensor], norm: float | Tensor, largest: float) -> None:
    """Scale gradients, in place, to a global norm of at most `largest` (0: no clipping).

    If `norm` is a tensor, the host doesn't read it; gradients below the limit are multiplied by 1.
    """
    tensors = list(gradients.values())
    if not tensors or not largest:  # a pipeline rank may have none, where all is frozen
        return
    if isinstance(norm, Tensor):
        factor = torch.where(norm > largest, largest / (norm + 1e-6), 1.0)
        # One kernel takes many tensors only where the factor has their dtype.
        torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
    elif norm > largest:
        torch._foreach_mul_(tensors, largest / (norm + 1e-6))


def _axes(placement: TensorLayout, sharded: bool, copies: bool) -> tuple[str, ...]:
    data = (
        (placement.data_axes.shard, *(placement.data_axes.replicate_axes if copies else ()))
        if sharded
        else ()
    )
    return sort_axes({PIPELINE, *placement.axes, *data})


KINDS = ("weight", "gradient", "activation")


class LayerStatistics:
    """Root mean squares of weights, gradients and, after `watch(True)`, activations, by layer.

    A layer is a block; other parameters are grouped by the first two parts of their name: "decoder.embedding", "head".
    Gradients are measured before clipping, activations at a block's output (XLNet: the content stream).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        distinct: GlobalNorm,
        *,
        compiled: bool,
    ) -> None:
        self._mesh, self._distinct, self._watches = mesh, distinct, False
        # Activations are reduced over all axes; replicas count equally often in squares and counts.
        self._kinds = [*distinct.axis_sets, AXES]
        inside = set(transformer_blocks(model))
        local_paths = [path for path, module in model.named_modules() if module in inside]
        # All pipeline ranks need the blocks of the full model.
        self._blocks = sorted(
            {path for rank in mesh.gather_objects(local_paths, (PIPELINE,)) for path in rank}
        )
        self._seen: dict[str, Tensor] = {}
        layer_of = {name: self._layer(name) for name in layout}
        self._layers = sorted(set(layer_of.values()))
        self._places = {name: self._layers.index(layer) for name, layer in layer_of.items()}
        # A compiled block has no place for a hook that may do nothing.
        for path in () if compiled else local_paths:
            model.get_submodule(path).register_forward_hook(self._hook(path))

    def watch(self, enabled: bool) -> None:
        """Enable or disable the measurement of activations in the next passes."""
        self._watches, self._seen = enabled, {}

    def measure(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Layer → kind → √mean x² over all ranks. A collective.

        weights, gradients: this rank's blocks. statistics: module path → further values, added to its layer.
        """
        device = next(iter(weights.values())).device
        # [axis set, layer, kind, sum of squares and count]
        shape = len(self._kinds), len(self._layers), len(KINDS), 2
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        for kind, tensors in enumerate((weights, gradients)):
            for name, tensor in tensors.items():
                if self._distinct.counted(name):
                    _add(sums[self._distinct.kind_of[name], self._places[name], kind], tensor)
        for path, seen in self._seen.items():
            sums[-1, self._layers.index(path), 2] = seen
        squares, counts = sum_by_axes(sums, self._kinds, self._mesh).unbind(-1)
        roots = (squares / counts).sqrt().tolist()
        self._seen = {}
        statistics_by_layer: dict[str, dict[str, Any]] = {
            layer: {kind: value for kind, value in zip(KINDS, values, strict=True) if value == value}
            for layer, values in zip(self._layers, roots, strict=True)
        }
        for path, numbers in (statistics or {}).items():
            around = (layer for layer in statistics_by_layer if f"{path}.".startswith(f"{layer}."))
            statistics_by_layer.setdefault(max(around, key=len, default=path), {}).update(numbers)
        return statistics_by_layer

    def _layer(self, name: str) -> str:
        for path in self._blocks:
            if name.startswith(f"{path}."):
                return path
        return ".".join(name.split(".")[:2]) if name.count(".") > 1 else name.partition(".")[0]

    def _hook(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            if self._watches and module.training and isinstance(stream, Tensor):
                cell = self._seen.setdefault(path, torch.zeros(2, dtype=torch.float64, device=stream.device))
                _add(cell, stream.detach())

        return hook


def _add(cell: Tensor, tensor: Tensor) -> None:
    cell[0] += sum_of_squares([tensor])
    cell[1] += tensor.numel()
