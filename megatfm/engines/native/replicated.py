"""ZeRO stages 0 and 1: every data rank computes with whole weights; gradients are reduced once a step, in buckets.

Gradients accumulate in `.grad`. In the last backward pass of a step, a bucket is reduced as soon as it is complete,
overlapping the rest of the pass. Stage 1 sums its shard over replicas when the next bucket has started. In a pipeline,
buckets are reduced after all passes, whatever the schedule.

After a step, stage 1 all-gathers the updated weights of all buckets at once. A block waits for the buckets of its own
weights when it next runs, so the others overlap.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from megatfm.engines.base import cast_inputs, materialize
from megatfm.engines.interface import Precision
from megatfm.engines.native.zero import ZeroOptions
from megatfm.ops.transfer import align, align_all
from megatfm.parallel.layout import ModelLayout, iter_blocks
from megatfm.parallel.mesh import DataAxes, Mesh

BUCKET_ELEMENTS = 2**24
"""Large enough for the network's full rate, small enough to fit beside the gradients (64 MB in float32)."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are packed into one buffer, so that one collective transfers all of them.

    shapes: name → shape. Each of `ranks` keeps ⌈rows / ranks⌉ rows of a tensor, the last ones fewer or none. The buffer
    is [ranks, width]; its row r holds the shard of rank r, padded with zeros. Full shards of a tensor are copied at
    once: a copy for each rank would launch thousands of kernels.
    """

    shapes: Mapping[str, Sequence[int]]
    ranks: int

    def shard_rows(self, name: str, rank: int) -> tuple[int, int]:
        """Return the first row that a rank keeps, and their number."""
        n_rows = self.shapes[name][0]
        rows_per_rank = -(-n_rows // self.ranks)
        first = min(rows_per_rank * rank, n_rows)
        return first, min(rows_per_rank, n_rows - first)

    def pack(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return a buffer with whole tensors, zeros for missing ones. like: has the buffer's dtype and device."""
        buffer = like.new_empty(self.ranks, self.width)
        for name, start, size in self._columns:
            shards = buffer[:, start : start + size]
            if name not in tensors:
                shards[:] = 0
                continue
            values = tensors[name].reshape(-1)
            n_full = values.numel() // max(1, size)
            shards[:n_full] = values[: n_full * size].view(n_full, size)
            if n_full < self.ranks:
                _fill(shards[n_full], values[n_full * size :])
                shards[n_full + 1 :] = 0
        return buffer

    def pack_shard(self, blocks: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return this rank's row of the buffer [width] from the rows that it keeps."""
        row = like.new_empty(self.width)
        for name, start, size in self._columns:
            _fill(row[start : start + size], blocks[name])
        return row

    def unpack(self, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy the buffer into whole tensors, in place."""
        for name, start, size in self._columns:
            shards, values = buffer[:, start : start + size], tensors[name].view(-1)
            n_full = values.numel() // max(1, size)
            values[: n_full * size].view(n_full, size).copy_(shards[:n_full])
            if n_full < self.ranks:
                remainder = values[n_full * size :]
                remainder.copy_(shards[n_full, : remainder.numel()])

    def unpack_shard(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Return views of the rows that a rank keeps in its row [width] of the buffer."""
        blocks = {}
        for name, start, _ in self._columns:
            shape = (self.shard_rows(name, rank)[1], *self.shapes[name][1:])
            blocks[name] = row[start : start + torch.Size(shape).numel()].view(shape)
        return blocks

    @property
    def width(self) -> int:
        """Elements of a rank's row of the buffer, with padding."""
        return sum(size for _, _, size in self._columns)

    @cached_property
    def _columns(self) -> list[tuple[str, int, int]]:
        """Name, start and size of each tensor's part of a row of the buffer."""
        columns, start = [], 0
        for name in self.shapes:
            size = self.shard_rows(name, 0)[1] * torch.Size(self.shapes[name][1:]).numel()
            columns.append((name, start, size))
            start += size
        return columns


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy values to the beginning of a buffer, and pad it with zeros. Zeroing the whole buffer first would take half
    as long again, and usually no padding is needed."""
    buffer[: values.numel()] = values.reshape(-1)
    if values.numel() < buffer.numel():
        buffer[values.numel() :] = 0


def assign_buckets(shapes: Mapping[str, Sequence[int]], ranks: int, max_elements: int) -> Iterator[Bucket]:
    """Yield buckets of neighbouring tensors, each of at most `max_elements` elements or of a single tensor."""
    bucket: dict[str, Sequence[int]] = {}
    n_elements = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if bucket and n_elements + size > max_elements:
            yield Bucket(bucket, ranks)
            bucket, n_elements = {}, 0
        bucket[name] = shape
        n_elements += size
    if bucket:
        yield Bucket(bucket, ranks)


def start_reduce_scatter(buffer: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[ranks, width] → this rank's row [width] of the sum over ranks, and the work to wait for."""
    row = buffer.new_empty(buffer.shape[1])
    return row, group._reduce_scatter_base(row, buffer.view(-1), dist.ReduceScatterOptions())


def start_all_gather(row: Tensor, ranks: int, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[width] on each rank → [ranks, width], and the work to wait for."""
    buffer = row.new_empty(ranks, row.numel())
    return buffer, group._allgather_base(buffer.view(-1), row)


class Replicated:
    """Whole weights on every rank. Stage 0 also keeps whole gradients and optimizer state on each. Stage 1
    reduce-scatters gradients over dp_shard × cp; a rank updates its rows in the stored precision, and weights are
    gathered after each change."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        *,
        zero_options: ZeroOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        materialize(model, precision, device)
        if precision.is_mixed:
            cast_inputs(model, precision.compute_dtype)
        self._mesh, self._precision = mesh, precision
        self._parameters = dict(model.named_parameters())
        self.sharded = zero_options.zero == 1
        self._buffer_like = torch.empty(0, dtype=zero_options.reduce_dtype or precision.param_dtype, device=device)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        frozen = {name: p for name, p in self._parameters.items() if name not in trained}
        assigned = self._assign(trained, layout)
        self._buckets = [bucket for bucket, _ in assigned]
        self._bucket_axes = [data_axes for _, data_axes in assigned]
        self._frozen = self._assign(frozen, layout)
        self._gradients: dict[str, Tensor] = {}
        self._pending_gradients: dict[int, tuple[Tensor, Work]] = {}
        self._awaited: list[set[nn.Parameter]] = []  # by bucket: gradients to come in the last backward pass
        self._unreached: set[str] = set()  # parameters that no pass of the step has reached
        # All ranks create these groups together. A pipeline stage without experts uses fewer of them, or uses them in
        # another order, so that the first backward pass would be too late.
        for data_axes in sorted({tensor_layout.data_axes for tensor_layout in layout.values()}, key=str):
            mesh.flat_group(data_axes.shard if self.sharded else data_axes.all)
        axes = {axis for tensor_layout in layout.values() for axis in tensor_layout.data_axes.all}
        self._needs_all_reduce = any(mesh.size(axis) > 1 for axis in axes)
        if self._needs_all_reduce:
            self._register_gradient_hooks()
        self._pending_parameters: dict[int, tuple[Tensor, Work]] = {}
        if self.sharded:
            self._register_parameter_waits(model)
        self.local: dict[str, Tensor] = {}
        self.zero_dims: dict[str, int] = {}
        for bucket, data_axes in (*assigned, *self._frozen):
            for name in bucket.shapes:
                first, count = bucket.shard_rows(name, self._shard_index(bucket, data_axes))
                rows = self._parameters[name].detach()[first : first + count]
                # The optimizer updates the model's weights themselves, or a copy if the stored precision differs or if
                # the rows of a shard are not aligned in memory; weights are then gathered from this copy.
                stored = rows.to(precision.param_dtype)
                self.local[name] = align(stored) if bucket.ranks > 1 else stored
                if bucket.ranks > 1:
                    self.zero_dims[name] = 0

    def _assign(self, parameters: Mapping[str, nn.Parameter], layout: ModelLayout) -> list[tuple[Bucket, DataAxes]]:
        """Assign parameters with the same data axes to buckets; returns each with these axes."""
        by_axes: dict[DataAxes, dict[str, torch.Size]] = {}
        for name, parameter in parameters.items():
            by_axes.setdefault(layout[name].data_axes, {})[name] = parameter.shape
        return [
            (bucket, data_axes)
            for data_axes, shapes in by_axes.items()
            for bucket in assign_buckets(
                shapes, self._mesh.count_shards(data_axes) if self.sharded else 1, BUCKET_ELEMENTS
            )
        ]

    def _shard_index(self, bucket: Bucket, data_axes: DataAxes) -> int:
        """Return the index of this rank's rows in a bucket."""
        return self._mesh.get_shard_index(data_axes) if bucket.ranks > 1 else 0

    def start_microbatch(self, is_last: bool) -> None:
        """Let every bucket await the gradients of all of its parameters before the last pass."""
        self._awaited = [{self._parameters[name] for name in b.shapes} for b in self._buckets] if is_last else []

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Await nothing: no pass is known to be the last."""
        self._awaited = []

    def reduce(self) -> None:
        self._awaited = []
        if not self._needs_all_reduce:
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._gradients = align_all(gradients)
            return
        while len(self._pending_gradients) < len(self._buckets):
            self._start_next_reduction()
        if self._buckets:
            self._start_replica_reduction(0)
        for index, (row, work) in self._pending_gradients.items():
            work.wait()
            bucket, data_axes = self._buckets[index], self._bucket_axes[index]
            row = row.to(self._precision.param_dtype)
            self._gradients |= align_all(bucket.unpack_shard(row, self._shard_index(bucket, data_axes)))
        for name in self._unreached:
            del self._gradients[name]
        self._pending_gradients, self._unreached = {}, set()

    def _register_gradient_hooks(self) -> None:
        # A weak reference: Python's garbage collector doesn't see cycles through these hooks.
        weak_self = weakref.ref(self)

        def hook(index: int, parameter: Tensor) -> None:
            if replicated := weak_self():
                replicated._on_gradient_ready(index, parameter)

        for index, bucket in enumerate(self._buckets):
            for name in bucket.shapes:
                self._parameters[name].register_post_accumulate_grad_hook(partial(hook, index))

    def _register_parameter_waits(self, model: nn.Module) -> None:
        """Let a block wait for its weights before it runs, and the model for those in no block and in compiled blocks,
        which can't wait. Any other module waits for its direct parameters, as a head may run alone."""
        bucket_index = {self._parameters[name]: i for i, bucket in enumerate(self._buckets) for name in bucket.shapes}
        weak_self = weakref.ref(self)

        def wait(indices: frozenset[int], *_: Any) -> None:
            if replicated := weak_self():
                replicated._finish_parameter_sync(indices)

        in_blocks: set[nn.Parameter] = set()
        compiled: set[nn.Module] = set()
        for block in iter_blocks(model):
            if block._compiled_call_impl is not None:
                compiled.update(block.modules())
            else:
                in_blocks.update(block.parameters())
                awaited = frozenset(bucket_index[p] for p in block.parameters() if p in bucket_index)
                block.register_forward_pre_hook(partial(wait, awaited))
        outside_blocks = frozenset(i for p, i in bucket_index.items() if p not in in_blocks)
        model.register_forward_pre_hook(partial(wait, outside_blocks))
        for module in model.modules():
            direct = module.parameters(recurse=False)
            awaited = frozenset(bucket_index[p] for p in direct if p in bucket_index)
            if awaited and module not in compiled:
                module.register_forward_pre_hook(partial(wait, awaited))

    def wait_for_weights(self) -> None:
        self._finish_parameter_sync(range(len(self._buckets)))

    @torch.no_grad()
    def _finish_parameter_sync(self, indices: Collection[int]) -> None:
        """Wait for buckets of weights that are in transfer, and unpack them."""
        for index in [i for i in self._pending_parameters if i in indices]:
            buffer, work = self._pending_parameters.pop(index)
            work.wait()
            self._buckets[index].unpack(buffer, self._parameters)

    def _on_gradient_ready(self, index: int, parameter: Tensor) -> None:
        """Start the reduction of complete buckets, in the same order on all ranks: that of the last layers first."""
        if not self._awaited:
            return
        if index in self._pending_gradients:
            names = [name for name in self._buckets[index].shapes if self._parameters[name] is parameter]
            raise RuntimeError(
                f"the gradient of {names[0]} arrived after its bucket was reduced: call backward once per micro-batch"
            )
        self._awaited[index].discard(parameter)
        while len(self._pending_gradients) < len(self._buckets) and not self._awaited[self._next_bucket]:
            self._start_next_reduction()

    @property
    def _next_bucket(self) -> int:
        return len(self._buckets) - 1 - len(self._pending_gradients)

    @torch.no_grad()
    def _start_next_reduction(self) -> None:
        index, bucket = self._next_bucket, self._buckets[self._next_bucket]
        parameters = {name: self._parameters[name] for name in bucket.shapes}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._unreached |= parameters.keys() - gradients.keys()
        buffer = bucket.pack(gradients, self._buffer_like)
        del gradients
        for parameter in parameters.values():  # now, so that no bucket is held twice
            parameter.grad = None
        data_axes = self._bucket_axes[index]
        if bucket.ranks > 1:
            self._pending_gradients[index] = start_reduce_scatter(buffer, self._mesh.flat_group(data_axes.shard))
        else:
            row = buffer[0]
            group = self._mesh.flat_group(data_axes.all)
            self._pending_gradients[index] = row, dist.all_reduce(row, group=group, async_op=True)
        if index + 1 < len(self._buckets):
            self._start_replica_reduction(index + 1)

    def _start_replica_reduction(self, index: int) -> None:
        """Wait for a bucket's reduce-scatter, and start the sum of its shard over replicas. Called when the
        reduce-scatter of the next bucket has started, as a wait for the newest one would hold up the backward pass."""
        bucket, data_axes = self._buckets[index], self._bucket_axes[index]
        for axis in data_axes.replicate_axes if bucket.ranks > 1 else ():
            if self._mesh.size(axis) > 1:
                row, work = self._pending_gradients[index]
                work.wait()
                work = dist.all_reduce(row, group=self._mesh.group(axis), async_op=True)
                self._pending_gradients[index] = row, work

    def gradients(self) -> dict[str, Tensor]:
        return dict(self._gradients)

    def zero_grad(self) -> None:
        self._gradients, self._pending_gradients = {}, {}
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def sync_weights(self, frozen: bool = False) -> None:
        for _, work in self._pending_parameters.values():
            work.wait()  # dropped: newer weights follow
        self._pending_parameters = {}
        changed = [*zip(self._buckets, self._bucket_axes, strict=True), *(self._frozen if frozen else [])]
        for index, (bucket, data_axes) in enumerate(changed):
            if bucket.ranks > 1:
                row = bucket.pack_shard(self.local, next(iter(self._parameters.values())))
                gathered = start_all_gather(row, bucket.ranks, self._mesh.flat_group(data_axes.shard))
                if not frozen:
                    self._pending_parameters[index] = gathered
                    continue
                buffer, work = gathered
                work.wait()
                bucket.unpack(buffer, self._parameters)
            elif self._precision.is_mixed:
                parameters: list[Tensor] = [self._parameters[name] for name in bucket.shapes]
                torch._foreach_copy_(parameters, [self.local[name] for name in bucket.shapes])
