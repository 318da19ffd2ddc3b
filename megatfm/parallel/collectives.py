"""The collectives of tensor parallelism, each with its adjoint written out.

A tensor is, over the ranks of a group, either *sharded* along a dim, *replicated*, or *partial* (its true value is
the sum over the ranks). The gradient of a replicated tensor is replicated where all ranks compute the same from it
and partial where each computes its own share. `tests/parity/test_collectives.py` holds <f(x), y> = <x, fᵀ(y)>.

Eager code asks the process group itself, which costs a third of torch's functional operators. Those are what
torch.compile follows, and what selective recomputation can keep the results of; their names have been the same from
torch 2.4 to 2.13, while those of the Python wrappers change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ops = torch.ops._c10d_functional


_SCATTERED_SUM = dist.ReduceScatterOptions()
_SUM = dist.AllreduceOptions()  # the sum is what torch takes if nothing is said
_use_functional: ContextVar[bool] = ContextVar("kept", default=False)


@contextmanager
def use_functional_collectives() -> Iterator[None]:
    """Within, collectives are operators that return what they made, so that their results can be kept."""
    token = _use_functional.set(True)
    try:
        yield
    finally:
        _use_functional.reset(token)


def _functional() -> bool:
    return torch.compiler.is_compiling() or _use_functional.get()


def _dim_to_front(x: Tensor, dim: int) -> Tensor:
    """With `dim` before the others. A move that moves nothing would stand in a compiled graph all the same."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim`."""
    first = _dim_to_front(x, dim)  # no copy for a single row
    if _functional():
        whole = _ops.wait_tensor(_ops.all_gather_into_tensor(first, group.size(), group.group_name))
    else:
        whole = first.new_empty((group.size() * first.shape[0], *first.shape[1:]))
        group._allgather_base(whole, first).wait()
    return whole.movedim(0, dim) if dim else whole


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, each keeping its shard along `dim`."""
    first = _dim_to_front(x, dim)
    if _functional():
        shard = _ops.wait_tensor(_ops.reduce_scatter_tensor(first, "sum", group.size(), group.group_name))
    else:
        shard = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
        group._reduce_scatter_base(shard, first, _SCATTERED_SUM).wait()
    return shard.movedim(0, dim) if dim else shard


def all_reduce_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, outside autograd."""
    if _functional():
        reduced: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
        return reduced
    total = x.detach().clone(memory_format=torch.contiguous_format)
    group.allreduce([total], _SUM).wait()
    return total


def all_gather_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """What every rank has, stacked [ranks, ...], outside autograd."""
    return _gather(x[None], 0, group)


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _reduce_scatter(gradient, ctx.dim, ctx.group), None, None


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sharded along `dim` → replicated, with a partial gradient. Adjoint: reduce-scatter."""
    return _GatherShards.apply(x, dim, group)


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _gather(gradient, ctx.dim, ctx.group), None, None


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Partial → sharded along `dim`. Adjoint: all-gather."""
    return _ScatterSum.apply(x, dim, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


def reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial → replicated, with a replicated gradient. Adjoint: the identity."""
    return _Sum.apply(x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return all_reduce_no_grad(gradient, ctx.group), None


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Replicated → the same, with a partial gradient. Adjoint: all-reduce."""
    return _Copy.apply(x, group)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all of rows: so many sent to, and so many received from each rank."""
    first = x.contiguous()
    if _functional():
        arrived: Tensor = _ops.wait_tensor(_ops.all_to_all_single(first, received, sent, group.group_name))
    else:
        arrived = first.new_empty((sum(received), *first.shape[1:]))
        group.alltoall_base(arrived, first, received, sent).wait()
    return arrived


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):  # type: ignore[no-untyped-def]
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Rows sorted by the rank that they go to → rows sorted by the rank that they come from; how many go to and come
    from each. Adjoint: the same the other way round."""
    return _ExchangeRows.apply(x, sent, received, group)


class _AsyncAllToAll:
    """Rows on their way to other ranks, or their gradients on the way back."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self._rows: tuple[
            Tensor, ...
        ] = ()  # those that leave, which must stay as they are, and those that come
        self._work: dist.Work | None = None

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """What will have arrived once `arrive` has waited for it."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        first = x.contiguous()
        if _functional():
            coming, self._work = _ops.all_to_all_single(first, received, sent, self._group.group_name), None
        else:
            coming = first.new_empty((sum(received), *first.shape[1:]))
            self._work = self._group.alltoall_base(coming, first, received, sent)
        self._rows = first, coming
        return coming

    def wait(self) -> Tensor:
        """What has come, to be read."""
        _, coming = self._rows
        if self._work is None:
            coming = _ops.wait_tensor(coming)
        else:
            self._work.wait()
        self._rows, self._work = (), None
        return coming


class _Start(torch.autograd.Function):
    """Gives the rows themselves, as their gradient is what `_Wait` gives on the way back."""

    @staticmethod
    def forward(ctx, x, journey):  # type: ignore[no-untyped-def]
        ctx.journey = journey
        journey.start(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return ctx.journey.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _, journey):  # type: ignore[no-untyped-def]
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.journey.start(gradient, back=True), None


def all_to_all_overlapped(
    meanwhile: Callable[[], None],
    x: Tensor,
    sent: list[int],
    received: list[int],
    group: ProcessGroup,
) -> Tensor:
    """The same as `all_to_all`, with something else computed while rows are on their way. Autograd goes through what
    was computed in between while their gradients are."""
    journey = _AsyncAllToAll(sent, received, group)
    left = _Start.apply(x, journey)
    meanwhile()
    return _Wait.apply(left, journey)


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        shards = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)
        return shards[dist.get_rank(ctx.group)], None, None


def all_gather_replicated(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sharded along `dim` → replicated, with a replicated gradient. Adjoint: taking the own shard."""
    return _GatherReplicated.apply(x, dim, group)
