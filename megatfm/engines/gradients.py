"""Gradients over all ranks: global norm, clipping, reduction of partial gradients, and layer statistics.

Each element of the model counts once, however its parameter is sharded or replicated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.ops.torch_private import foreach_norm
from megatfm.parallel.layout import ModelLayout, TensorLayout, iter_blocks
from megatfm.parallel.mesh import AXES, PIPELINE, Mesh, sort_axes

CHUNK_ELEMENTS = 2**14
"""Elements of a partial norm on a CPU. torch's norm accumulates in a few float32 sums: 0.3 % too small for 38 M
elements, but within 2e-7 for this many (2e-6 from bfloat16). GPU kernels reduce hierarchically by themselves."""


class GlobalNorm:
    """Computes norms over all elements of the model, reducing each parameter over the axes that shard it.

    sharded: whether dp_shard × cp shard parameters too (ZeRO 1 to 3). shards_replicas: then whether dp_replicate does
    as well. is_counted: name → whether this rank counts a parameter that several pipeline ranks hold.
    """

    def __init__(
        self,
        layout: ModelLayout,
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
        shards_replicas: bool = False,
        is_counted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._mesh, self._device, self.is_counted = mesh, device, is_counted
        axes = {
            name: _find_sharded_axes(tensor_layout, sharded, shards_replicas) for name, tensor_layout in layout.items()
        }
        # From the layout, which lists the full model, so that all ranks have the same axis sets.
        self.axis_sets = sorted(set(axes.values()))
        self.axis_set_of = {name: self.axis_sets.index(name_axes) for name, name_axes in axes.items()}

    def compute(self, tensors: Mapping[str, Tensor], found_inf: bool = False) -> Tensor:
        """Return √Σ t² over the blocks of all ranks, a float64 scalar. A collective.

        tensors: name → this rank's block. found_inf: return NaN; NaN on one rank is NaN on all.
        """
        squares = torch.zeros(len(self.axis_sets), dtype=torch.float64, device=self._device)
        blocks_by_set: dict[int, list[Tensor]] = {}
        for name, tensor in tensors.items():
            if self.is_counted(name):
                blocks_by_set.setdefault(self.axis_set_of[name], []).append(tensor)
        for axis_set, blocks in blocks_by_set.items():
            squares[axis_set] = sum_squares(blocks)
        if found_inf:
            squares.fill_(torch.nan)
        return sum_by_axes(squares, self.axis_sets, self._mesh).sqrt()


@torch.no_grad()
def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ x² over all elements of tensors of one device and dtype, a float64 scalar on that device.

    Accumulates in float32 within chunks (float64 for float64 tensors), and in float64 over chunks. Returns 0 without
    elements, as on a rank whose shards are all empty.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        return torch.stack(foreach_norm(list(tensors), 2, dtype)).double().square().sum()
    norms, remainders = [], []
    for tensor in tensors:
        flat, n_full = tensor.reshape(-1), tensor.numel() // CHUNK_ELEMENTS * CHUNK_ELEMENTS
        if n_full:
            norms.append(torch.linalg.vector_norm(flat[:n_full].view(-1, CHUNK_ELEMENTS), dim=1, dtype=dtype))
        if n_full < len(flat):
            remainders.append(flat[n_full:])
    if remainders:
        norms.append(torch.stack(foreach_norm(remainders, 2, dtype)))
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).double().square().sum()


def sum_by_axes(sums: Tensor, axis_sets: Sequence[Sequence[str]], mesh: Mesh) -> Tensor:
    """[axis sets, …] → […]: all-reduce each row over its axes, then sum the rows. A collective."""
    rows = list(sums.unbind(0))  # indexing by a list would copy it to the device, and wait
    for axis in mesh.reduction_order:
        indices = [i for i, axes in enumerate(axis_sets) if axis in axes]
        if indices and mesh.size(axis) > 1:
            stacked = torch.stack([rows[i] for i in indices])
            mesh.all_reduce_(stacked, (axis,))
            for i, row in zip(indices, stacked.unbind(0), strict=True):
                rows[i] = row
    return torch.stack(rows).sum(0)


def all_reduce_partial_gradients(gradients: Mapping[str, Tensor], layout: ModelLayout, mesh: Mesh) -> None:
    """Sum partial gradients over their `partial_axes`, in place: one collective for each set of axes.

    gradients: name → this rank's block.
    """
    partial: dict[tuple[str, ...], list[Tensor]] = {}
    for name, gradient in gradients.items():
        if axes := layout[name].partial_axes:
            partial.setdefault(axes, []).append(gradient)
    for axes, tensors in sorted(partial.items()):
        all_reduce_flat(tensors, lambda flat, axes=axes: mesh.all_reduce_(flat, axes))  # type: ignore[misc]


def all_reduce_flat(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], None]) -> None:
    """Reduce tensors in place by one call of `all_reduce` on a flat buffer; no call if there are no tensors."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def clip_gradients(gradients: Mapping[str, Tensor], norm: float | Tensor, max_norm: float) -> None:
    """Scale gradients, in place, to a global norm of at most `max_norm` (0: no clipping).

    If `norm` is a tensor, the host doesn't read it; gradients below the limit are multiplied by 1.
    """
    tensors = list(gradients.values())
    if not tensors or not max_norm:  # a pipeline rank whose weights are all frozen has no gradients
        return
    if isinstance(norm, Tensor):
        factor = torch.where(norm > max_norm, max_norm / (norm + 1e-6), 1.0)
        # The fused kernel needs a factor of the tensors' dtype.
        torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
    elif norm > max_norm:
        torch._foreach_mul_(tensors, max_norm / (norm + 1e-6))


def _find_sharded_axes(layout: TensorLayout, sharded: bool, shards_replicas: bool) -> tuple[str, ...]:
    """Return the axes that divide the elements of a parameter."""
    axes = {PIPELINE, *layout.axes}
    if sharded:
        axes.update(layout.data_axes.shard)
        if shards_replicas:
            axes.update(layout.data_axes.replicate_axes)
    return sort_axes(axes)


KINDS = ("weight", "gradient", "activation")
"""Values that `LayerStatistics` measures."""


class LayerStatistics:
    """Root mean squares of weights, gradients and, after `watch(True)`, activations, by layer.

    A layer is a block; other parameters are grouped by the first two parts of their name: "decoder.embedding", "head".
    Gradients are measured before clipping, activations at a block's output (XLNet: the content stream).
    """

    def __init__(
        self, model: nn.Module, layout: ModelLayout, mesh: Mesh, global_norm: GlobalNorm, *, compiled: bool
    ) -> None:
        self._mesh, self._norm, self._is_watching = mesh, global_norm, False
        # Activations are reduced over all axes; replicas count equally often in squares and counts.
        self._axis_sets = [*global_norm.axis_sets, AXES]
        blocks = set(iter_blocks(model))
        local_paths = [path for path, module in model.named_modules() if module in blocks]
        # All pipeline ranks need the blocks of the full model.
        self._blocks = sorted({path for rank in mesh.gather_objects(local_paths, (PIPELINE,)) for path in rank})
        self._activations: dict[str, Tensor] = {}  # path → [sum of squares, count]
        layer_of = {name: self._find_layer(name) for name in layout}
        self._layers = sorted(set(layer_of.values()))
        self._layer_index = {name: self._layers.index(layer) for name, layer in layer_of.items()}
        # Not in compiled blocks: a hook that only sometimes measures would break their graphs.
        for path in () if compiled else local_paths:
            model.get_submodule(path).register_forward_hook(self._make_hook(path))

    def watch(self, enabled: bool) -> None:
        """Enable or disable the measurement of activations in the next passes."""
        self._is_watching, self._activations = enabled, {}

    def measure(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Return layer → kind → √mean x² over all ranks. A collective.

        weights, gradients: this rank's blocks. statistics: module path → further values, added to its layer.
        """
        device = next(iter(weights.values())).device
        # [axis set, layer, kind, sum of squares and count]
        shape = len(self._axis_sets), len(self._layers), len(KINDS), 2
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        for kind, tensors in enumerate((weights, gradients)):
            for name, tensor in tensors.items():
                if self._norm.is_counted(name):
                    _add(sums[self._norm.axis_set_of[name], self._layer_index[name], kind], tensor)
        for path, total in self._activations.items():
            sums[-1, self._layers.index(path), 2] = total
        squares, counts = sum_by_axes(sums, self._axis_sets, self._mesh).unbind(-1)
        roots = (squares / counts).sqrt().tolist()
        self._activations = {}
        statistics_by_layer: dict[str, dict[str, Any]] = {
            layer: {kind: value for kind, value in zip(KINDS, values, strict=True) if value == value}
            for layer, values in zip(self._layers, roots, strict=True)
        }
        for path, values in (statistics or {}).items():
            parents = (layer for layer in statistics_by_layer if f"{path}.".startswith(f"{layer}."))
            statistics_by_layer.setdefault(max(parents, key=len, default=path), {}).update(values)
        return statistics_by_layer

    def _find_layer(self, name: str) -> str:
        for path in self._blocks:
            if name.startswith(f"{path}."):
                return path
        return ".".join(name.split(".")[:2]) if name.count(".") > 1 else name.partition(".")[0]

    def _make_hook(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            if self._is_watching and module.training and isinstance(stream, Tensor):
                zeros = torch.zeros(2, dtype=torch.float64, device=stream.device)
                _add(self._activations.setdefault(path, zeros), stream.detach())

        return hook


def _add(total: Tensor, tensor: Tensor) -> None:
    """Add a tensor to a total [sum of squares, count]."""
    total[0] += sum_squares([tensor])
    total[1] += tensor.numel()
