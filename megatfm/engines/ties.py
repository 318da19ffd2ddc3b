"""Parameters that several pipeline ranks hold, because stages of theirs use them: tied tables, shared layers, biases.

Each holder has the gradient of its own stages; the sum over them is that of the parameter. All of them update alike.
Likewise for what modules that several ranks hold observed of their micro-batches.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.parallel.mesh import PIPELINE, Mesh
from megatfm.parallel.pipeline_cut import Pipeline


class TiedParameters:
    """Of this rank with the other ranks of its pipeline; nothing where there is none."""

    def __init__(self, pipeline: Pipeline | None, mesh: Mesh) -> None:
        self._rank, self._holders = mesh.rank(PIPELINE), pipeline.parameter_ranks if pipeline else {}
        self._modules = pipeline.module_ranks if pipeline else {}
        self._names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, holders in sorted(self._holders.items()):
            if len(holders) > 1 and pipeline and name not in pipeline.frozen:
                self._names[holders].append(name)
        shared = {holders for holders in (*self._names, *self._modules.values()) if len(holders) > 1}
        groups = {holders: _group(holders, mesh) for holders in sorted(shared)}
        self._groups = {holders: group for holders, group in groups.items() if self._rank in holders}

    def all_reduce_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of all holders up, in place."""
        for holders in self._groups:
            shares = [gradients[name] for name in self._names[holders] if name in gradients]
            if not shares:
                continue
            flat = torch.cat([share.reshape(-1) for share in shares])
            self.all_reduce(holders, flat)
            for share, total in zip(shares, flat.split([share.numel() for share in shares]), strict=True):
                share.copy_(total.view_as(share))

    def all_reduce(self, holders: tuple[int, ...], tensor: Tensor) -> None:
        """Sum a tensor in place over pipeline ranks, of which this is one."""
        if len(holders) > 1:
            dist.all_reduce(tensor, group=self._groups[holders])

    @property
    def groups(self) -> Iterable[ProcessGroup]:
        """Process groups that this rank sums in."""
        return self._groups.values()

    def is_owner(self, name: str) -> bool:
        """Whether this is the one rank of a pipeline on which a parameter is counted."""
        return not self._holders or self._holders[name][0] == self._rank

    def holders_of_module(self, path: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a module with buffers."""
        return self._modules.get(path, (self._rank,))


def _group(holders: tuple[int, ...], mesh: Mesh) -> ProcessGroup:
    """These ranks of this rank's pipeline; called by all ranks, which make the groups of all pipelines together."""
    ranks = mesh.device_mesh.mesh.flatten(1)
    if len(holders) == len(ranks):
        return mesh.group(PIPELINE)
    group, _ = dist.new_subgroups_by_enumeration(ranks[list(holders)].T.tolist())
    return group
