"""ZeRO stages 0 and 1: every data rank computes with whole weights; gradients are reduced once a step.

Gradients add up in `.grad`. In the last backward pass of a step a bucket is on its way as soon as it is complete, while
the pass goes on. In a pipeline, whose passes take turns, buckets go when all passes are done, so any schedule will do.

After a step stage 1 sends the moved weights for all buckets at once; a block waits for those that hold its own when it
next runs, so that the others arrive meanwhile.
"""

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work

from megatfm.engines.native.buckets import BUCKET_ELEMENTS, Bucket, all_gather, assign_buckets, reduce_scatter
from megatfm.engines.native.data_parallel import Stages, ZeroOptions, named_parameters
from megatfm.engines.precision import Precision
from megatfm.engines.prepare import cast_inputs, materialize
from megatfm.ops.aligned import align_all, aligned
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.layout import Chunk, ModelLayout
from megatfm.parallel.mesh import DataAxes, Mesh


class Replicated:
    """Stage 0 keeps everything on every rank. Stage 1 scatters the summed gradients over dp_shard; a rank moves the
    rows that it is given, in the stored precision, and the weights are gathered after each change."""

    def __init__(
        self,
        stages: Stages,
        layout: ModelLayout,
        mesh: Mesh,
        *,
        sharing: ZeroOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        for stage in stages:
            materialize(stage, precision, device)
            if precision.is_mixed:
                cast_inputs(stage, precision.compute_dtype)
        self._mesh, self._precision = mesh, precision
        self._parameters = dict(named_parameters(stages))
        self.sharded = sharing.zero == 1
        self._buffer_like = torch.empty(0, dtype=sharing.reduce_dtype or precision.param_dtype, device=device)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        frozen = {name: p for name, p in self._parameters.items() if name not in trained}
        dealt = self._assign(trained, layout)
        self._buckets, self._bucket_axes = [bucket for bucket, _ in dealt], [data for _, data in dealt]
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
            self._register_parameter_waits(stages)
        self.local: dict[str, Tensor] = {}
        self.boxes: dict[str, Chunk] = {}
        for bucket, data in (*dealt, *self._frozen):
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
        """Whose rows of a bucket are kept here."""
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
            own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._gradients = align_all(own)
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
        this = weakref.ref(
            self
        )  # hooks lie where Python's collector sees no cycle: what they hold would stay for ever

        def complete(place: int, parameter: Tensor) -> None:
            if watcher := this():
                watcher._on_gradient_ready(place, parameter)

        for name in places:
            parameter = self._parameters[name]
            parameter.register_post_accumulate_grad_hook(partial(complete, places[name]))

    def _register_parameter_waits(self, stages: Stages) -> None:
        """Before a block runs, the weights in it arrive; before a stage does, those that lie in none. A compiled block
        can't wait by itself: its stage does. Any other module that runs alone, as a head may, waits for its own."""
        places = {
            self._parameters[name]: p for p, bucket in enumerate(self._buckets) for name in bucket.shapes
        }
        this = weakref.ref(self)

        def arrive(wanted: frozenset[int], *_: Any) -> None:
            if watcher := this():
                watcher._finish_parameter_sync(wanted)

        for stage in stages:
            inside: set[nn.Parameter] = set()
            compiled: set[nn.Module] = set()
            for block in transformer_blocks(stage):
                if block._compiled_call_impl is not None:
                    compiled.update(block.modules())
                else:
                    inside.update(block.parameters())
                    own = frozenset(places[p] for p in block.parameters() if p in places)
                    block.register_forward_pre_hook(partial(arrive, own))
            rest = frozenset(places[p] for p in stage.parameters() if p in places and p not in inside)
            stage.register_forward_pre_hook(partial(arrive, rest))
            for module in stage.modules():
                here = frozenset(places[p] for p in module.parameters(recurse=False) if p in places)
                if here and module not in compiled:
                    module.register_forward_pre_hook(partial(arrive, here))

    def wait_for_weights(self) -> None:
        self._finish_parameter_sync(range(len(self._buckets)))

    @torch.no_grad()
    def _finish_parameter_sync(self, places: Collection[int]) -> None:
        """Buckets of weights that are on their way are there, and in their places."""
        for place in [place for place in self._pending_parameters if place in places]:
            buffer, work = self._pending_parameters.pop(place)
            work.wait()
            self._buckets[place].unpack(buffer, self._parameters)

    def _on_gradient_ready(self, place: int, parameter: Tensor) -> None:
        """A gradient is there. Buckets go in one order, the same on all ranks: the one of the last layers first."""
        if not self._awaited:
            return
        if place in self._pending_gradients:
            raise RuntimeError("a gradient came after its bucket was sent: a pass has changed it twice")
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
        for (
            _,
            work,
        ) in self._pending_parameters.values():  # overtaken: what is in their places may be the newer weights
            work.wait()
        self._pending_parameters = {}
        changed = [*zip(self._buckets, self._bucket_axes, strict=True), *(self._frozen if frozen else [])]
        for place, (bucket, data) in enumerate(changed):
            if bucket.ranks > 1:
                row = bucket.pack_shard(self.local, next(iter(self._parameters.values())))
                sent = all_gather(row, bucket.ranks, self._mesh.group(data.shard))
                if not frozen:
                    self._pending_parameters[place] = sent
                    continue
                sent[1].wait()
                bucket.unpack(sent[0], self._parameters)
            elif self._precision.is_mixed:
                own: list[Tensor] = [self._parameters[name] for name in bucket.shapes]
                torch._foreach_copy_(own, [self.local[name] for name in bucket.shapes])
