"""The data ranks as a ring, for losses that compare all samples of a global batch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.parallel.collectives import all_gather_no_grad
from megatfm.parallel.context_parallel import P2PExchange
from megatfm.parallel.layout import replace_forward
from megatfm.parallel.mesh import Mesh


class DataRing:
    """The ranks among which a global batch lies; implements `megatfm.ops.contrastive.Ring`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        """Return how many samples the block has that is here after 0, 1, … steps. A collective."""
        by_rank = all_gather_no_grad(torch.full((1,), n, device=device), self._group).flatten().tolist()
        return [by_rank[(self._rank - step) % self.size] for step in range(self.size)]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors [n, …] to the next rank; returns those [length, …] of the rank before."""
        after, before = (self._rank + 1) % self.size, (self._rank - 1) % self.size
        received = [tensor.new_empty(length, *tensor.shape[1:]) for tensor in tensors]
        # Nothing is sent of a rank without samples: some backends don't send empty tensors.
        sent = [(after, tensor) for tensor in tensors if tensor.numel()]
        P2PExchange(self._group, sent, [(before, tensor) for tensor in received if tensor.numel()]).wait()
        return received


def install_data_ring(model: nn.Module, mesh: Mesh) -> None:
    """Have each module with `dp_plan = "ring"` see the samples of all data ranks."""
    modules = [module for module in model.modules() if getattr(module, "dp_plan", None) == "ring"]
    if modules and mesh.data_ranks > 1:
        ring = DataRing(mesh.flat_group(mesh.data_axes))
        for module in modules:
            replace_forward(module, partial(module.forward, ring=ring))
