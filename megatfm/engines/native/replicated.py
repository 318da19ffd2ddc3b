"""ZeRO stages 0 and 1: every data rank computes with whole weights; gradients are reduced once a step, in buckets.

Gradients add up in `.grad`. In the last backward pass of a step a bucket is reduced as soon as it is complete, while
the pass goes on. In a pipeline, whose passes take turns, buckets go when all passes are done, so any schedule will do.

After a step stage 1 sends the moved weights for all buckets at once; a block waits for those that hold its own when it
next runs, so that the others arrive meanwhile.
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
from megatfm.ops.transfer import align_all, aligned
from megatfm.parallel.layout import Chunk, ModelLayout, transformer_blocks
from megatfm.parallel.mesh import DataAxes, Mesh

BUCKET_ELEMENTS = 2**24
"""Enough for a network to run at its full rate, little enough to lie beside the gradients (64 MB in float32)."""


@dataclass(frozen=True)
class Bucket:
    """Tensors packed into one buffer, so that one collective moves many of them.

    Their rows are divided among `ranks`: ⌈rows / ranks⌉ to each, the last ones fewer or none. The buffer is [ranks,
    width]; row r holds what rank r keeps, filled up with zeros.
    """

    shapes: Mapping[str, Sequence[int]]
    ranks: int

    def rows(self, name: str, rank: int) -> tuple[int, int]:
        """The first row that a rank keeps, and how many."""
        n_rows = self.shapes[name][0]
        rows_per_rank = -(-n_rows // self.ranks)
        first = min(rows_per_rank * rank, n_rows)
        return first, min(rows_per_rank, n_rows - first)

    def pack(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Copy whole tensors into the buffer; a missing one is zeros. like: has the buffer's dtype and device."""
        buffer = like.new_empty(self.ranks, self.width)
        for name, start, size in self._columns:
            if name not in tensors:
                buffer[:, start : start + size] = 0
                continue
            rows = tensors[name].reshape(self.shapes[name][0], -1)
            for rank in range(self.ranks):
                first, count = self.rows(name, rank)
                _fill(buffer[rank, start : start + size], rows[first : first + count])
        return buffer

    def pack_shard(self, blocks: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The rows that this rank keeps → its row of the buffer [width]."""
        row = like.new_empty(self.width)
        for name, start, size in self._columns:
            _fill(row[start : start + size], blocks[name])
        return row

    def unpack(self, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """The buffer → whole tensors, in place."""
        for name, start, size in self._columns:
            rows = tensors[name].view(self.shapes[name][0], -1)
            for rank in range(self.ranks):
                first, count = self.rows(name, rank)
                part = rows[first : first + count]
                part.copy_(buffer[rank, start : start + size][: part.numel()].view_as(part))

    def unpack_shard(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Row [width] of a rank → views of the rows that it keeps."""
        blocks = {}
        for name, start, _ in self._columns:
            shape = (self.rows(name, rank)[1], *self.shapes[name][1:])
            blocks[name] = row[start : start + torch.Size(shape).numel()].view(shape)
        return blocks

    @property
    def width(self) -> int:
        """Elements of each rank in the buffer, with padding."""
        return sum(size for _, _, size in self._columns)

    @cached_property
    def _columns(self) -> list[tuple[str, int, int]]:
        """Name, start and size of what each tensor takes in a row of the buffer."""
        columns, start = [], 0
        for name in self.shapes:
            size = self.rows(name, 0)[1] * torch.Size(self.shapes[name][1:]).numel()
            columns.append((name, start, size))
            start += size
        return columns


def _fill(buffer: Tensor, part: Tensor) -> None:
    """Copy a part to the beginning of a buffer, and zeros after it. Usually none are needed, and zeroing the buffer
    first would take half as long again."""
    buffer[: part.numel()] = part.reshape(-1)
    if part.numel() < buffer.numel():
        buffer[part.numel() :] = 0


def assign_buckets(shapes: Mapping[str, Sequence[int]], ranks: int, max_elements: int) -> Iterator[Bucket]:
    """Buckets of neighbouring tensors, each of at most `max_elements` elements or of one tensor."""
    bucket: dict[str, Sequence[int]] = {}
    filled = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if bucket and filled + size > max_elements:
            yield Bucket(bucket, ranks)
            bucket, filled = {}, 0
        bucket[name] = shape
        filled += size
    if bucket:
        yield Bucket(bucket, ranks)


def reduce_scatter(buffer: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[ranks, width] → [width], this rank's row of the sum over the ranks, and what to wait for before it is used."""
    row = buffer.new_empty(buffer.shape[1])
    return row, group._reduce_scatter_base(row, buffer.view(-1), dist.ReduceScatterOptions())


def all_gather(row: Tensor, ranks: int, group: ProcessGroup) -> tuple[Tensor, Work]:
    """[width] of each rank → [ranks, width], and what to wait for before it is used."""
    buffer = row.new_empty(ranks, row.numel())
    return buffer, group._allgather_base(buffer.view(-1), row)


class Replicated:
    """Stage 0 keeps everything on every rank. Stage 1 scatters the summed gradients over dp_shard; a rank moves its own
    rows, in the stored precision, and the weights are gathered after each change."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        *,
        sharing: ZeroOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        materialize(model, precision, device)
        if precision.is_mixed:
            cast_inputs(model, precision.compute_dtype)
        self._mesh, self._precision = mesh, precision
        self._parameters = dict(model.named_parameters())
        self.sharded = sharing.zero == 1
        self._buffer_like = torch.empty(0, dtype=sharing.reduce_dtype or precision.param_dtype, device=device)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        frozen = {name: p for name, p in self._parameters.items() if name not in trained}
        assigned = self._assign(trained, layout)
        self._buckets, self._bucket_axes = [bucket for bucket, _ in assigned], [data for _, data in assigned]
        self._frozen = self._assign(frozen, layout)
        self._gradients: dict[str, Tensor] = {}
        self._pending_gradients: dict[int, tuple[Tensor, Work]] = {}
        self._awaited: list[set[nn.Parameter]] = []  # of each bucket, in the last backward pass
        self._unreached: set[str] = set()  # parameters that no pass of the step has reached
        axes = {axis for placement in layout.values() for axis in placement.data_axes.all}
        self._sums = any(mesh.size(axis) > 1 for axis in axes)
        if self._sums:
            self._register_gradient_hooks()
        self._pending_parameters: dict[int, tuple[Tensor, Work]] = {}
        if self.sharded:
            self._register_parameter_waits(model)
        self.local: dict[str, Tensor] = {}
        self.boxes: dict[str, Chunk] = {}
        for bucket, data in (*assigned, *self._frozen):
            for name, shape in bucket.shapes.items():
                first, count = bucket.rows(name, self._rank(bucket, data))
                rows = self._parameters[name].detach()[first : first + count]
                # Without a precision of its own, what the optimizer moves are the model's weights themselves; of a cut,
                # rows that don't begin where memory does are moved in a copy, from which weights are gathered too.
                stored = rows.to(precision.param_dtype)
                self.local[name] = aligned(stored) if bucket.ranks > 1 else stored
                offsets = (first, *[0] * (len(shape) - 1))
                self.boxes[name] = layout[name].subregion(offsets, (count, *shape[1:]))

    def _assign(
        self, parameters: Mapping[str, nn.Parameter], layout: ModelLayout
    ) -> list[tuple[Bucket, DataAxes]]:
        """Buckets of parameters with the same data axes, and these axes."""
        by_axes: dict[DataAxes, dict[str, torch.Size]] = {}
        for name, parameter in parameters.items():
            by_axes.setdefault(layout[name].data_axes, {})[name] = parameter.shape
        return [
            (bucket, data)
            for data, shapes in by_axes.items()
            for bucket in assign_buckets(
                shapes, self._mesh.size(data.shard) if self.sharded else 1, BUCKET_ELEMENTS
            )
        ]

    def _rank(self, bucket: Bucket, data: DataAxes) -> int:
        """Return the index of this rank's rows in a bucket."""
        return self._mesh.rank(data.shard) if bucket.ranks > 1 else 0

    def begin(self, is_last: bool) -> None:
        """In the last pass, every bucket misses the gradients of all of its parameters."""
        self._awaited = (
            [{self._parameters[name] for name in b.shapes} for b in self._buckets] if is_last else []
        )

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """No pass is known to be the last."""
        self._awaited = []

    def reduce(self) -> None:
        self._awaited = []
        if not self._sums:  # nothing to sum, so nothing to pack
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._gradients = align_all(gradients)
            return
        while len(self._pending_gradients) < len(self._buckets):
            self._start_next_reduction()
        for place, (row, work) in self._pending_gradients.items():
            work.wait()
            bucket, data = self._buckets[place], self._bucket_axes[place]
            if bucket.ranks > 1:
                self._mesh.all_reduce_(row, data.replicate_axes)
            row = row.to(self._precision.param_dtype)
            self._gradients |= align_all(bucket.unpack_shard(row, self._rank(bucket, data)))
        for name in self._unreached:
            del self._gradients[name]
        self._pending_gradients, self._unreached = {}, set()

    def _register_gradient_hooks(self) -> None:
        places = {name: place for place, bucket in enumerate(self._buckets) for name in bucket.shapes}
        # Hooks lie where Python's collector sees no cycle: they would keep it alive.
        weak_self = weakref.ref(self)

        def complete(place: int, parameter: Tensor) -> None:
            if engine := weak_self():
                engine._on_gradient_ready(place, parameter)

        for name in places:
            parameter = self._parameters[name]
            parameter.register_post_accumulate_grad_hook(partial(complete, places[name]))

    def _register_parameter_waits(self, model: nn.Module) -> None:
        """Have a block wait for its weights before it runs, and the model for those in no block. A compiled block can't
        wait by itself: the model does. Any other module that runs alone, as a head may, waits for its own."""
        places = {
            self._parameters[name]: p for p, bucket in enumerate(self._buckets) for name in bucket.shapes
        }
        weak_self = weakref.ref(self)

        def arrive(indices: frozenset[int], *_: Any) -> None:
            if engine := weak_self():
                engine._finish_parameter_sync(indices)

        in_blocks: set[nn.Parameter] = set()
        compiled: set[nn.Module] = set()
        for block in transformer_blocks(model):
            if block._compiled_call_impl is not None:
                compiled.update(block.modules())
            else:
                in_blocks.update(block.parameters())
                awaited = frozenset(places[p] for p in block.parameters() if p in places)
                block.register_forward_pre_hook(partial(arrive, awaited))
        outside_blocks = frozenset(
            places[p] for p in model.parameters() if p in places and p not in in_blocks
        )
        model.register_forward_pre_hook(partial(arrive, outside_blocks))
        for module in model.modules():
            awaited = frozenset(places[p] for p in module.parameters(recurse=False) if p in places)
            if awaited and module not in compiled:
                module.register_forward_pre_hook(partial(arrive, awaited))

    def wait_for_weights(self) -> None:
        self._finish_parameter_sync(range(len(self._buckets)))

    @torch.no_grad()
    def _finish_parameter_sync(self, places: Collection[int]) -> None:
        """Wait for the buckets of weights in transfer, and unpack them."""
        for place in [place for place in self._pending_parameters if place in places]:
            buffer, work = self._pending_parameters.pop(place)
            work.wait()
            self._buckets[place].unpack(buffer, self._parameters)

    def _on_gradient_ready(self, place: int, parameter: Tensor) -> None:
        """A gradient has arrived. Buckets go in one order, the same on all ranks: the one of the last layers first."""
        if not self._awaited:
            return
        if place in self._pending_gradients:
            names = [name for name in self._buckets[place].shapes if self._parameters[name] is parameter]
            raise RuntimeError(
                f"the gradient of {names[0]} arrived after its bucket was reduced: call backward once per micro-batch"
            )
        self._awaited[place].discard(parameter)
        while len(self._pending_gradients) < len(self._buckets) and not self._awaited[self._next]:
            self._start_next_reduction()

    @property
    def _next(self) -> int:
        return len(self._buckets) - 1 - len(self._pending_gradients)

    @torch.no_grad()
    def _start_next_reduction(self) -> None:
        place, bucket = self._next, self._buckets[self._next]
        parameters = {name: self._parameters[name] for name in bucket.shapes}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._unreached |= parameters.keys() - gradients.keys()
        buffer = bucket.pack(gradients, self._buffer_like)
        del gradients
        for parameter in parameters.values():  # at once, so that no two whole copies are held
            parameter.grad = None
        data = self._bucket_axes[place]
        if bucket.ranks > 1:
            self._pending_gradients[place] = reduce_scatter(buffer, self._mesh.group(data.shard))
        else:
            row = buffer[0]
            group = self._mesh.flat_group(data.all)
            self._pending_gradients[place] = row, dist.all_reduce(row, group=group, async_op=True)

    def gradients(self) -> dict[str, Tensor]:
        return dict(self._gradients)

    def zero_grad(self) -> None:
        self._gradients, self._pending_gradients = {}, {}
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def weights_changed(self, frozen: bool = False) -> None:
        for _, work in self._pending_parameters.values():
            work.wait()  # overtaken: the parameters may hold newer weights already
        self._pending_parameters = {}
        changed = [*zip(self._buckets, self._bucket_axes, strict=True), *(self._frozen if frozen else [])]
        for place, (bucket, data) in enumerate(changed):
            if bucket.ranks > 1:
                row = bucket.pack_shard(self.local, next(iter(self._parameters.values())))
                gathered_rows = all_gather(row, bucket.ranks, self._mesh.group(data.shard))
                if not frozen:
                    self._pending_parameters[place] = gathered_rows
                    continue
                gathered_rows[1].wait()
                bucket.unpack(gathered_rows[0], self._parameters)
            elif self._precision.is_mixed:
                parameters: list[Tensor] = [self._parameters[name] for name in bucket.shapes]
                torch._foreach_copy_(parameters, [self.local[name] for name in bucket.shapes])
