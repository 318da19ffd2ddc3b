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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ops = torch.ops._c10d_functional


_SCATTERED_SUM = dist.ReduceScatterOptions()
_SUM = dist.AllreduceOptions()  # sum is torch's default
_use_functional: ContextVar[bool] = ContextVar("use_functional", default=False)


@contextmanager
def use_functional_collectives() -> Iterator[None]:
    """Have collectives be operators that return new tensors, so that recomputation can keep their results."""
    token = _use_functional.set(True)
    try:
        yield
    finally:
        _use_functional.reset(token)


def _functional() -> bool:
    return torch.compiler.is_compiling() or _use_functional.get()


def _dim_to_front(x: Tensor, dim: int) -> Tensor:
    """Move `dim` to the front. A move that changes nothing would still be in a compiled graph."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim`."""
    first = _dim_to_front(x, dim)  # no copy for a single row
    if _functional():
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(first, group.size(), group.group_name))
    else:
        gathered = first.new_empty((group.size() * first.shape[0], *first.shape[1:]))
        group._allgather_base(gathered, first).wait()
    return gathered.movedim(0, dim) if dim else gathered


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
    """Stack every rank's tensor, [ranks, ...], outside autograd."""
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


def all_to_all_no_grad(
    x: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup
) -> Tensor:
    """All-to-all of rows, outside autograd. sent, received: how many go to, and come from, each rank."""
    first = x.contiguous()
    if _functional():
        arrived: Tensor = _ops.wait_tensor(
            _ops.all_to_all_single(first, output_splits, input_splits, group.group_name)
        )
    else:
        arrived = first.new_empty((sum(output_splits), *first.shape[1:]))
        group.alltoall_base(arrived, first, output_splits, input_splits).wait()
    return arrived


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group):  # type: ignore[no-untyped-def]
        ctx.sent, ctx.received, ctx.group = input_splits, output_splits, group
        return all_to_all_no_grad(x, input_splits, output_splits, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return all_to_all_no_grad(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(x: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
    """Rows sorted by the rank that they go to → rows sorted by the rank that they come from. sent, received: how many
    go to, and come from, each rank. Adjoint: the same the other way round."""
    return _ExchangeRows.apply(x, input_splits, output_splits, group)


class _AsyncAllToAll:
    """Rows on their way to other ranks, or their gradients on the way back."""

    def __init__(self, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> None:
        self._sent, self._received, self._group = input_splits, output_splits, group
        self._buffers: tuple[Tensor, ...] = ()  # rows sent, which must stay as they are, and rows received
        self._work: dist.Work | None = None

    def start(self, x: Tensor, *, back: bool = False) -> None:
        """Start to send rows. back: along the way that gradients take."""
        input_splits, output_splits = (self._received, self._sent) if back else (self._sent, self._received)
        first = x.contiguous()
        if _functional():
            output, self._work = (
                _ops.all_to_all_single(first, output_splits, input_splits, self._group.group_name),
                None,
            )
        else:
            output = first.new_empty((sum(output_splits), *first.shape[1:]))
            self._work = self._group.alltoall_base(output, first, output_splits, input_splits)
        self._buffers = first, output

    def wait(self) -> Tensor:
        """Wait for the rows that `start` requested."""
        _, output = self._buffers
        if self._work is None:
            output = _ops.wait_tensor(output)
        else:
            self._work.wait()
        self._buffers, self._work = (), None
        return output


class _Start(torch.autograd.Function):
    """Returns the rows themselves: their gradient is what `_Wait` starts to send back."""

    @staticmethod
    def forward(ctx, x, exchange):  # type: ignore[no-untyped-def]
        ctx.exchange = exchange
        exchange.start(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return ctx.exchange.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _, exchange):  # type: ignore[no-untyped-def]
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.exchange.start(gradient, back=True), None


def all_to_all_overlapped(
    meanwhile: Callable[[], None],
    x: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    group: ProcessGroup,
) -> Tensor:
    """`all_to_all` that calls `meanwhile` while rows are on their way. The backward pass of what that computed runs
    while their gradients are."""
    exchange = _AsyncAllToAll(input_splits, output_splits, group)
    in_transfer = _Start.apply(x, exchange)
    meanwhile()
    return _Wait.apply(in_transfer, exchange)


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


@dataclass(frozen=True)
class TensorParallelGroup:
    """The tensor-parallel group, and what moves activations between the residual stream and weights that are cut.

    With sequence parallelism, the residual stream is sharded by tokens (see `styles.py`); without, replicated.
    """

    group: ProcessGroup
    sequence_parallel: bool

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def gather_input(self, x: Tensor) -> Tensor:
        """Residual stream → replicated input of cut weights."""
        if self.sequence_parallel:
            return _in_rows(all_gather(x.flatten(0, 1), 0, self.group), x)
        return copy_to_group(x, self.group)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Partial output of cut weights → residual stream."""
        if self.sequence_parallel:
            return _in_rows(reduce_scatter(x.flatten(0, 1), 0, self.group), x)
        return reduce_from_group(x, self.group)

    def gather_replicated(self, x: Tensor) -> Tensor:
        """Residual stream → replicated, for what every rank computes alike."""
        if self.sequence_parallel:
            return _in_rows(all_gather_replicated(x.flatten(0, 1), 0, self.group), x)
        return x

    def split_tokens(self, x: Tensor) -> Tensor:
        """Replicated → residual stream; every rank keeps its part of the tokens."""
        if self.sequence_parallel:
            return _in_rows(x.flatten(0, 1).chunk(self.group.size())[self.rank], x)
        return x

    def row_sums(self, x_BTX: Tensor) -> Tensor:
        """Residual stream → sums [B, X] over this rank's tokens of each row."""
        if not self.sequence_parallel:
            return x_BTX.sum(1)
        rows, length = x_BTX.shape[:2]
        first = self.rank * rows * length
        numbers = torch.arange(first, first + rows * length, device=x_BTX.device)
        precise = torch.promote_types(x_BTX.dtype, torch.float32)
        sums_BX = torch.zeros(rows, x_BTX.shape[2], dtype=precise, device=x_BTX.device)
        rows_N = numbers // (length * self.group.size())
        return sums_BX.index_add(0, rows_N, x_BTX.flatten(0, 1).to(precise)).to(x_BTX.dtype)


def _in_rows(x: Tensor, like: Tensor) -> Tensor:
    """Tokens [N, ...] in as many rows as another tensor has."""
    return x.unflatten(0, (len(like), -1))
