"""Root mean squares of weights, gradients and activations, layer by layer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.distinct import GlobalNorm, sum_by_axes
from megatfm.ops.squares import sum_of_squares
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import AXES, PIPELINE, Mesh

KINDS = ("weight", "gradient", "activation")


class LayerStatistics:
    """Watches the outputs of a model's blocks where asked to, and measures blocks and what lies beside them.

    A layer is a block, or for what lies in none the module below the model's root and one more: "decoder.embedding",
    "head". What is measured: √mean x², of gradients before clipping, of a block's output in the residual stream
    (XLNet's content stream, which the last block doesn't go on with).
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
        # Activations differ over all axes, or are copies, which count with their number in squares and counts alike.
        self._kinds = [*distinct.axis_sets, AXES]
        inside = set(transformer_blocks(model))
        here = [path for path, module in model.named_modules() if module in inside]
        # The layout has the names of the whole model, and each pipeline rank some of its blocks.
        self._blocks = sorted({path for rank in mesh.gather_objects(here, (PIPELINE,)) for path in rank})
        self._seen: dict[str, Tensor] = {}
        layer_of = {name: self._layer(name) for name in layout}
        self._layers = sorted(set(layer_of.values()))
        self._places = {name: self._layers.index(layer) for name, layer in layer_of.items()}
        # A compiled block has no place for a hook that may do nothing.
        for path in () if compiled else here:
            model.get_submodule(path).register_forward_hook(self._hook(path))

    def watch(self, enabled: bool) -> None:
        """Whether the next passes' activations are measured."""
        self._watches, self._seen = enabled, {}

    def measure(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        statistics: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Layer → kind → √mean x² over all ranks, of blocks of weights and gradients, and what modules, by path, tell
        of themselves. A collective."""
        device = next(iter(weights.values())).device
        # [axes that cut it, layer, kind, sum of squares and count]
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
        found: dict[str, dict[str, Any]] = {
            layer: {kind: value for kind, value in zip(KINDS, values, strict=True) if value == value}
            for layer, values in zip(self._layers, roots, strict=True)
        }
        for path, numbers in (statistics or {}).items():
            around = (layer for layer in found if f"{path}.".startswith(f"{layer}."))
            found.setdefault(max(around, key=len, default=path), {}).update(numbers)
        return found

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
