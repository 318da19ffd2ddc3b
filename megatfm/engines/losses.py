"""The loss of a global batch: each term's sum over all micro-batches of all ranks, divided by its count over them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatfm.engines.interface import Arrays, Batch, LossFunction, Sums
from megatfm.ops.aligned import aligned
from megatfm.parallel.mesh import Mesh


class LossSums:
    """Adds terms and counts up. Each term is summed on the pipeline rank that makes it."""

    def __init__(self, objective: LossFunction, mesh: Mesh, device: torch.device) -> None:
        self._objective, self._mesh, self._device = objective, mesh, device
        self.counts = dict.fromkeys(objective.weights, 0)
        self._sums = {term: torch.zeros((), dtype=torch.float64, device=device) for term in objective.weights}

    def count(self, batches: Iterable[Batch]) -> None:
        """Count the terms of micro-batches, each data rank's own, over all of them. A collective."""
        totals = dict.fromkeys(self.counts, 0)
        for batch in batches:
            for term, count in self._objective.counts(batch).items():
                totals[term] += int(count)
        for term, total in self._over_ranks(totals, self._mesh.data_axes).items():
            self.counts[term] += int(total)

    def weigh(self, terms: Mapping[str, Tensor]) -> Tensor:
        """The share of one micro-batch's terms in the loss of all that was counted."""
        weights = self._objective.weights
        weighted = [weights[name] / max(self.counts[name], 1) * term for name, term in terms.items()]
        return torch.stack(weighted).sum()

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add the terms of one micro-batch to what this rank reports."""
        for term, value in terms.items():
            self._sums[term] += value

    def result(self) -> Sums:
        """Sums and counts over all ranks. A collective."""
        axes = self._mesh.loss_axes
        return Sums(self._over_ranks(self._sums, axes), self.counts, self._objective.weights)

    def _over_ranks(self, values: Mapping[str, Tensor | float], axes: Sequence[str]) -> dict[str, float]:
        """Sum scalars over axes, in float64 (exact for counts below 2⁵³)."""
        flat = torch.tensor([float(v) for v in values.values()], dtype=torch.float64, device=self._device)
        self._mesh.sum(flat, axes)
        return dict(zip(values, flat.tolist(), strict=True))


def to_device(batch: Arrays, device: torch.device) -> dict[str, Tensor]:
    """A batch as the loader gives it → tensors on the device."""
    return {
        field: aligned(torch.as_tensor(values).to(device, non_blocking=True))
        for field, values in batch.items()
    }
