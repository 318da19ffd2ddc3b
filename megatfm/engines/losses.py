"""Loss of a global batch: for each term, its sum divided by its count, over all micro-batches and ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatfm.engines.interface import Arrays, Batch, LossFunction, LossTotals, RowSources
from megatfm.errors import MegatfmError
from megatfm.layers.output_head import LMHead, RowLossRecorder
from megatfm.ops.attention.fused import compute_cu_seqlens
from megatfm.ops.cross_entropy import IGNORE
from megatfm.ops.transfer import DeferredReads, align, move_to_device
from megatfm.parallel.context_parallel import split_batch
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import Mesh


@dataclass(frozen=True)
class TermWeights:
    """Factors of the loss terms of a micro-batch in the loss of the global batch.

    factors: float64 [terms], on the device. indices: term → its index in `factors`.
    """

    factors: Tensor
    indices: Mapping[str, int]

    def __call__(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of the terms of one micro-batch, a scalar."""
        weighted = [self.factors[self.indices[name]].to(term.dtype) * term for name, term in terms.items()]
        return torch.stack(weighted).sum()


class LossAccumulator:
    """Accumulates loss terms and target counts. Each term is summed on the pipeline rank that computes it.

    reads: deferred device reads, which the read of the result joins. sources: sources of rows, for losses by source.
    summed: sums and counts of the result, on the device.
    """

    summed: Tensor

    def __init__(
        self,
        objective: LossFunction,
        mesh: Mesh,
        device: torch.device,
        reads: DeferredReads | None = None,
        sources: RowSources | None = None,
    ) -> None:
        self._objective, self._mesh, self._device = objective, mesh, device
        self._reads = reads or DeferredReads()
        self._term_index = {term: i for i, term in enumerate(objective.loss_weights)}
        self._sources = sources
        n_sums = len(self._term_index) + (len(sources.names) if sources else 0)
        # In float64, exact for counts below 2⁵³.
        self._counts, self._sums = torch.zeros(2, n_sums, dtype=torch.float64, device=device)
        self._local_counts = torch.zeros(n_sums, dtype=torch.float64)
        self._n_batches = 0

    def count(self, batches: Iterable[Arrays]) -> None:
        """Count the targets of this rank's micro-batches, and sum over all data ranks. A collective."""
        self.count_local(batches)
        self.sum_counts()

    def count_local(self, batches: Iterable[Arrays]) -> None:
        """Count the targets of this rank's micro-batches, on the host."""
        for batch in batches:
            host_batch = to_device(batch, torch.device("cpu"))
            for term, count in self._objective.target_counts(host_batch).items():
                self._local_counts[self._term_index[term]] += count
            if self._sources:
                sources = torch.from_numpy(self._sources.by_microbatch[self._n_batches])
                row_counts = (host_batch["targets"] != IGNORE).sum(1, dtype=torch.float64)
                self._local_counts[len(self._term_index) :].index_add_(0, sources, row_counts)
            self._n_batches += 1

    def sum_counts(self) -> None:
        """Sum this rank's counts over all data ranks. A collective.

        Raises MegatfmError if a rank had no batch: the loss would read 0.
        """
        if not self._n_batches:
            raise MegatfmError("no batch to compute a loss of: every rank must bring at least one")
        counts = move_to_device(self._local_counts, self._device)
        self._mesh.all_reduce_(counts, self._mesh.batch_axes)
        self._counts += counts
        self._local_counts = torch.zeros_like(self._local_counts)

    def compute_term_weights(self, scale: float = 1.0) -> TermWeights:
        """Return the factors of the terms by the counts so far, times `scale` (a power of 2)."""
        counts = self._counts.clamp(min=1)
        weights = self._objective.loss_weights.items()
        factors = [scale * (weight / counts[self._term_index[name]]) for name, weight in weights]
        return TermWeights(torch.stack(factors), self._term_index)

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add the terms of one micro-batch to this rank's sums."""
        for term, value in terms.items():
            self._sums[self._term_index[term]] += value

    def add_row_losses(self, recorders: Iterable[RowLossRecorder], batches: Sequence[Batch]) -> None:
        """Add row losses to the sums of their sources, if this rank computed them.

        recorders: one for each language-model head, with a loss for each row of each batch.
        """
        source_sums = self._sums[len(self._term_index) :]
        by_microbatch = self._sources.by_microbatch if self._sources else ()
        for recorder in recorders:
            for batch, sources in zip(batches, by_microbatch, strict=True):
                losses = recorder.sum_losses_by_row(batch["targets"])
                if losses is not None:
                    source_sums.index_add_(0, move_to_device(torch.from_numpy(sources), losses.device), losses)

    def compute_totals(self) -> LossTotals:
        """Reduce sums and counts over all ranks; return them as totals. A collective."""
        sums = self._sums.clone()
        self._mesh.all_reduce_(sums, self._mesh.loss_axes)
        self.summed = torch.cat([sums, self._counts])
        sources = self._sources.names if self._sources else ()
        return LossTotals(self._objective.loss_weights, self._reads.defer(self.summed), sources)


INITIAL_SCALE, MAX_SCALE, MIN_SCALE = 2.0**16, 2.0**24, 1.0
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale is doubled, as in torch.amp.GradScaler."""
SCALE_KEY, STEPS_KEY = "engine.loss_scale", "engine.loss_scale_steps"


class LossScale:
    """Dynamic loss scale of float16 (Micikevicius et al. 2018, section 3.2).

    It lifts gradients that are too small for float16 into its range; a step whose gradients overflow is skipped. All
    ranks see the same norm of the gradients, so they hold the same scale.
    """

    def __init__(self, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.value, self._growth_interval, self._steps = initial, growth_interval, 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step. finite: whether its gradients were."""
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, MIN_SCALE)
        elif self._steps == self._growth_interval:
            self.value, self._steps = min(self.value * 2, MAX_SCALE), 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may cure an overflow."""
        return self.value > MIN_SCALE

    def state_dict(self) -> dict[str, Tensor]:
        """Return the scale and the finite steps since it last changed, as scalars, so that a resume scales alike."""
        return {
            SCALE_KEY: torch.tensor(self.value, dtype=torch.float64),
            STEPS_KEY: torch.tensor(self._steps, dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a saved scale; a checkpoint of another precision has none."""
        value, steps = state.get(SCALE_KEY), state.get(STEPS_KEY)
        if isinstance(value, Tensor) and isinstance(steps, Tensor):
            self.value, self._steps = value.item(), int(steps)


@contextmanager
def record_row_losses(heads: Sequence[LMHead]) -> Iterator[list[RowLossRecorder]]:
    """Record row losses at the language-model heads within this context."""
    recorders = [RowLossRecorder() for _ in heads]
    for head, recorder in zip(heads, recorders, strict=True):
        head.recorder = recorder
    try:
        yield recorders
    finally:
        for head in heads:
            head.recorder = None


def check_no_pending_gradients(pending_losses: object) -> None:
    """Raise MegatfmError if gradients of an earlier pass wait for a step.

    They can't be accumulated: each pass reduces its gradients, and weights its loss by the counts of its batch.
    """
    if pending_losses is not None:
        raise MegatfmError(
            "forward_backward was called twice without a step: give it all micro-batches of a step at once, or drop "
            "the gradients with zero_grad()"
        )


def make_local_batch(batch: Arrays, device: torch.device, layout: ModelLayout) -> dict[str, Tensor]:
    """Return a micro-batch on the device; under context parallelism, only this rank's tokens of each row."""
    if layout.context_parallel is not None:
        # Split before the move, so that the host keeps a copy of each field (see `megatfm.ops.transfer`).
        return to_device(split_batch(to_device(batch, torch.device("cpu")), layout.context_parallel), device)
    return to_device(batch if device.type == "cpu" else add_cu_seqlens(batch), device)


def add_cu_seqlens(batch: Arrays) -> Arrays:
    """Return a batch with `cu_seqlens` for GPU kernels, computed on the host, which then needn't wait for the
    device."""
    cu_seqlens = {
        name.replace("documents", "cu_seqlens"): compute_cu_seqlens(np.asarray(values))
        for name, values in batch.items()
        if name in ("documents", "encoder_documents")
    }
    return {**batch, **cu_seqlens}


def to_device(batch: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Convert a loader's batch to tensors on the device."""
    tensors = {field: torch.as_tensor(values) for field, values in batch.items()}
    if device.type == "cpu":
        return {field: align(values) for field, values in tensors.items()}
    return {field: move_to_device(values, device) for field, values in tensors.items()}
