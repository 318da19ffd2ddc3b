"""What modules keep that is no gradient's: counted while micro-batches pass, updated once a step over all ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.interface import Stateful
from megatfm.engines.ties import TiedParameters
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, PIPELINE, Mesh, sort_axes


class ModuleState:
    """The stateful modules of this rank's stages (see `interface.Stateful`), and all buffers that are stored.

    What a module observed is summed over the data axes, over those where its buffers' plan row says that ranks have a
    share each, and over the pipeline ranks that hold it.
    """

    def __init__(
        self, model: nn.Module, layout: ModelLayout, mesh: Mesh, ties: TiedParameters | None = None
    ) -> None:
        self._mesh, self._ties = mesh, ties or TiedParameters(None, mesh)
        self._modules: dict[str, tuple[Stateful, tuple[str, ...]]] = {}
        for path, module in model.named_modules():
            axes = _axes(path, module, layout)
            if isinstance(module, Stateful):
                self._modules[path] = module, axes
        buffers = dict(model.named_buffers())
        self.boxes = {
            name: ShardedTensor(buffers[name], placement.shape, placement.region[0])
            for name, placement in layout.state.items()
            if name in buffers
        }

    def forget(self) -> None:
        """Nothing was observed since the last step."""
        for module, _ in self._modules.values():
            module.reset_counts()

    @torch.no_grad()
    def update(self) -> None:
        """Let each module take what all ranks observed into its state. A collective, where there is such a module."""
        for _, module, total in self._totals():
            module.update(total)

    @torch.no_grad()
    def statistics(self) -> dict[str, dict[str, Any]]:
        """By path, what modules that have a method `statistics` tell of what all ranks observed. A collective."""
        statistics: dict[str, dict[str, Any]] = {}
        for path, module, total in self._totals():
            if moe_options := getattr(module, "statistics", None):
                statistics[path] = moe_options(total)
        if self._mesh.size(PIPELINE) == 1:
            return statistics
        return {
            path: one
            for each in self._mesh.gather_objects(statistics, (PIPELINE,))
            for path, one in each.items()
        }

    def _totals(self) -> Iterator[tuple[str, Stateful, dict[str, Tensor]]]:
        """Each module with the sums of what was observed. A collective."""
        for (axes, holders), own in self._modules_by_ranks():
            sums = [
                (path, name, value)
                for path in own
                for name, value in sorted(self._modules[path][0].observed.items())
            ]
            if not sums:  # no pass reached them, on any rank
                continue
            # In float64 whole numbers add up to the same in any order.
            flat = torch.cat([value.double().reshape(-1) for _, _, value in sums])
            self._mesh.all_reduce_(flat, axes)
            self._ties.all_reduce(holders, flat)
            totals: dict[str, dict[str, Tensor]] = {path: {} for path, _, _ in sums}
            pieces = flat.split([value.numel() for _, _, value in sums])
            for (path, name, value), total in zip(sums, pieces, strict=True):
                totals[path][name] = total.view_as(value).to(value.dtype)
            for path, total in totals.items():
                yield path, self._modules[path][0], total

    def _modules_by_ranks(self) -> Iterator[tuple[tuple[tuple[str, ...], tuple[int, ...]], list[str]]]:
        """(axes, pipeline ranks) → the modules that are summed over these, in the same order on all ranks."""
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[str]] = {}
        for path, (_, axes) in self._modules.items():
            groups.setdefault((axes, self._ties.holders_of_module(path)), []).append(path)
        yield from sorted(groups.items(), key=lambda item: item[0])


def _axes(path: str, module: nn.Module, layout: ModelLayout) -> tuple[str, ...]:
    own = [layout.buffers[f"{path}.{key}"] for key, _ in module.named_buffers(recurse=False)]
    data = {axis for placement in own for axis in placement.data_axes.all} or set(DENSE_DATA_AXES.all)
    return sort_axes({*data, *(axis for placement in own for axis in placement.partial_axes)})
