"""Ring of ranks with different samples, for losses that compare all samples of a global batch (contrastive losses)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.ops.torch_private import is_fake
from megatfm.parallel.collectives import all_gather_no_grad
from megatfm.parallel.context_parallel import P2PExchange
from megatfm.parallel.layout import replace_forward
from megatfm.parallel.mesh import DENSE_DATA_AXES, Mesh


class DataRing:
    """Rotates blocks of samples around the ranks that divide them; implements `megatfm.ops.contrastive.Ring`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        """Return the sizes of the blocks that this rank holds after 0, 1, … rotations. n: its own. A collective.

        Fake tensors have no values: all blocks are taken for as large as this rank's.
        """
        gathered = all_gather_no_grad(torch.full((1,), n, device=device), self._group).flatten()
        if is_fake(gathered):
            gathered.cpu()  # a trace counts this host wait
            return [n] * self.size
        lengths_by_rank = gathered.tolist()
        return [lengths_by_rank[(self._rank - step) % self.size] for step in range(self.size)]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors [n, …] to the next rank; returns the previous rank's [length, …]."""
        after, before = (self._rank + 1) % self.size, (self._rank - 1) % self.size
        received = [tensor.new_empty(length, *tensor.shape[1:]) for tensor in tensors]
        # Empty tensors are not sent: some backends refuse them.
        sends = [(after, tensor) for tensor in tensors if tensor.numel()]
        P2PExchange(self._group, sends, [(before, tensor) for tensor in received if tensor.numel()]).wait()
        return received


def install_data_ring(model: nn.Module, mesh: Mesh) -> None:
    """Pass a `DataRing` to each module with `dp_plan = "ring"`, so that it sees the samples of all data ranks.

    Context-parallel ranks have different samples of their rows, and are in the ring, too.
    """
    modules = [module for module in model.modules() if getattr(module, "dp_plan", None) == "ring"]
    if modules and mesh.gradient_ranks > 1:
        ring = DataRing(mesh.flat_group(DENSE_DATA_AXES.all))
        for module in modules:
            replace_forward(module, partial(module.forward, ring=ring))
