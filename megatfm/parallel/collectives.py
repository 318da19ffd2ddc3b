"""Differentiable collectives of tensor parallelism, each with its adjoint.

Over the ranks of a group, a tensor is *sharded* along a dim, *replicated*, or *partial* (its true value is
the sum over the ranks). The gradient of a replicated tensor is replicated where all ranks compute the same from it
and partial where each computes its own share. `tests/parity/test_collectives.py` checks <f(x), y> = <x, fᵀ(y)>.

Eager code calls the process group directly, which takes a third of the time of torch's functional operators.
torch.compile can trace only the functional operators, and selective recomputation can keep only their results. We call
torch.ops because its names are the same from torch 2.4 to 2.13, while the Python wrappers are renamed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

_ops = torch.ops._c10d_functional

_REDUCE_SCATTER_OPTIONS = dist.ReduceScatterOptions()
_ALL_REDUCE_OPTIONS = dist.AllreduceOptions()  # torch's default is sum
_use_functional: ContextVar[bool] = ContextVar("use_functional", default=False)
_is_partial_product: ContextVar[bool] = ContextVar("is_partial_product", default=False)


@contextmanager
def use_functional_collectives() -> Iterator[None]:
    """Run collectives as functional operators, whose results recomputation can keep."""
    token = _use_functional.set(True)
    try:
        yield
    finally:
        _use_functional.reset(token)


def multiply_partial(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, a rank's term of a sum over ranks. Selective recomputation saves the sum, and not the term."""
    if torch.compiler.is_compiling() or not _use_functional.get():
        return F.linear(x, weight, bias)
    token = _is_partial_product.set(True)
    try:
        return F.linear(x, weight, bias)
    finally:
        _is_partial_product.reset(token)


def is_partial_product() -> bool:
    """Return whether the running matmul is one of `multiply_partial` in a pass of selective recomputation."""
    return _is_partial_product.get()


def _is_functional() -> bool:
    return torch.compiler.is_compiling() or _use_functional.get()


def _move_dim_to_front(x: Tensor, dim: int) -> Tensor:
    """Move `dim` to the front. Skips dim 0: a no-op move would still appear in a compiled graph."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather along `dim`."""
    first = _move_dim_to_front(x, dim)  # no copy for a single row
    if _is_functional():
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(first, group.size(), group.group_name))
    else:
        gathered = first.new_empty((group.size() * first.shape[0], *first.shape[1:]))
        group._allgather_base(gathered, first).wait()
    return gathered.movedim(0, dim) if dim else gathered


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, each keeping its shard along `dim`."""
    first = _move_dim_to_front(x, dim)
    if _is_functional():
        shard = _ops.wait_tensor(_ops.reduce_scatter_tensor(first, "sum", group.size(), group.group_name))
    else:
        shard = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
        group._reduce_scatter_base(shard, first, _REDUCE_SCATTER_OPTIONS).wait()
    return shard.movedim(0, dim) if dim else shard


def all_reduce_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, outside autograd."""
    if _is_functional():
        reduced: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
        return reduced
    total = x.detach().clone(memory_format=torch.contiguous_format)
    group.allreduce([total], _ALL_REDUCE_OPTIONS).wait()
    return total


def all_gather_no_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Stack every rank's tensor, [ranks, ...], outside autograd."""
    return _gather(x[None], 0, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _reduce_scatter(gradient, ctx.dim, ctx.group), None, None


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sharded along `dim` → replicated, with a partial gradient. Adjoint: reduce-scatter."""
    return _AllGather.apply(x, dim, group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _gather(gradient, ctx.dim, ctx.group), None, None


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Partial → sharded along `dim`. Adjoint: all-gather."""
    return _ReduceScatter.apply(x, dim, group)


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        return all_reduce_no_grad(x, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


def reduce_from_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial → replicated, with a replicated gradient. Adjoint: the identity."""
    return _ReduceFromGroup.apply(x, group)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return all_reduce_no_grad(gradient, ctx.group), None


def copy_to_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Replicated → the same, with a partial gradient. Adjoint: all-reduce."""
    return _CopyToGroup.apply(x, group)


def all_to_all_no_grad(x: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all of rows, outside autograd. input_splits, output_splits: rows sent to, and received from, each rank."""
    first = x.contiguous()
    if _is_functional():
        arrived: Tensor = _ops.wait_tensor(_ops.all_to_all_single(first, output_splits, input_splits, group.group_name))
    else:
        arrived = first.new_empty((sum(output_splits), *first.shape[1:]))
        group.alltoall_base(arrived, first, output_splits, input_splits).wait()
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group):  # type: ignore[no-untyped-def]
        ctx.sent, ctx.received, ctx.group = input_splits, output_splits, group
        return all_to_all_no_grad(x, input_splits, output_splits, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return all_to_all_no_grad(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(x: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
    """Exchange rows sorted by destination rank for rows sorted by source rank.

    input_splits, output_splits: rows sent to, and received from, each rank. Adjoint: the all-to-all with both swapped.
    """
    return _AllToAll.apply(x, input_splits, output_splits, group)


class _AsyncAllToAll:
    """An all-to-all in flight: of rows, or of their gradients in the opposite direction."""

    def __init__(self, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> None:
        self._sent, self._received, self._group = input_splits, output_splits, group
        self._buffers: tuple[Tensor, ...] = ()  # rows sent, kept alive until `wait`, and rows received
        self._work: dist.Work | None = None

    def start(self, x: Tensor, *, back: bool = False) -> None:
        """Start the transfer. back: from receivers to senders, as for gradients."""
        input_splits, output_splits = (self._received, self._sent) if back else (self._sent, self._received)
        first = x.contiguous()
        if _is_functional():
            output = _ops.all_to_all_single(first, output_splits, input_splits, self._group.group_name)
        else:
            output = first.new_empty((sum(output_splits), *first.shape[1:]))
            self._work = self._group.alltoall_base(output, first, output_splits, input_splits)
        self._buffers = first, output

    def wait(self) -> Tensor:
        """Wait for the transfer and return the received rows."""
        _, output = self._buffers
        if self._work is None:
            output = _ops.wait_tensor(output)
        else:
            self._work.wait()
        self._buffers, self._work = (), None
        return output


class _Start(torch.autograd.Function):
    """Starts the exchange and returns its input, whose gradient is the result of the exchange that `_Wait` starts."""

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
    overlapped: Callable[[], None], x: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup
) -> Tensor:
    """`all_to_all` that overlaps with computation: calls `overlapped` during the transfer.

    In the backward pass, the gradients' transfer overlaps with the backward pass of `overlapped`.
    """
    exchange = _AsyncAllToAll(input_splits, output_splits, group)
    in_transfer = _Start.apply(x, exchange)
    overlapped()
    return _Wait.apply(in_transfer, exchange)


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):  # type: ignore[no-untyped-def]
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        shards = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)
        return shards[dist.get_rank(ctx.group)], None, None


def all_gather_replicated(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sharded along `dim` → replicated, with a replicated gradient. Adjoint: this rank's shard."""
    return _AllGatherReplicated.apply(x, dim, group)


@dataclass(frozen=True)
class TensorParallelGroup:
    """The tensor-parallel group, with the collectives between the residual stream and sharded weights.

    The residual stream is sharded by tokens with sequence parallelism (see `styles.py`), else replicated.
    """

    group: ProcessGroup
    sequence_parallel: bool

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def gather_input(self, x: Tensor) -> Tensor:
        """Residual stream → replicated input of sharded weights."""
        if self.sequence_parallel:
            return _unflatten_rows(all_gather(x.flatten(0, 1), 0, self.group), x)
        return copy_to_group(x, self.group)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Partial output of sharded weights → residual stream."""
        if self.sequence_parallel:
            return _unflatten_rows(reduce_scatter(x.flatten(0, 1), 0, self.group), x)
        return reduce_from_group(x, self.group)

    def gather_replicated(self, x: Tensor) -> Tensor:
        """Residual stream → replicated, for computations that all ranks repeat."""
        if self.sequence_parallel:
            return _unflatten_rows(all_gather_replicated(x.flatten(0, 1), 0, self.group), x)
        return x

    def split_tokens(self, x: Tensor) -> Tensor:
        """Replicated → residual stream; each rank keeps its shard of the tokens."""
        if self.sequence_parallel:
            return _unflatten_rows(x.flatten(0, 1).chunk(self.group.size())[self.rank], x)
        return x

    def sum_rows(self, x_BTX: Tensor) -> Tensor:
        """Residual stream → sums [B, X] over this rank's tokens of each row."""
        if not self.sequence_parallel:
            return x_BTX.sum(1)
        rows, length = x_BTX.shape[:2]
        first = self.rank * rows * length  # index of this rank's first token in the micro-batch
        token_indices_N = torch.arange(first, first + rows * length, device=x_BTX.device)
        precise = torch.promote_types(x_BTX.dtype, torch.float32)
        sums_BX = torch.zeros(rows, x_BTX.shape[2], dtype=precise, device=x_BTX.device)
        row_indices_N = token_indices_N // (length * self.group.size())
        return sums_BX.index_add(0, row_indices_N, x_BTX.flatten(0, 1).to(precise)).to(x_BTX.dtype)


def _unflatten_rows(x: Tensor, like: Tensor) -> Tensor:
    """Reshape tokens [N, ...] to [B, N/B, ...], with as many rows B as `like`."""
    return x.unflatten(0, (len(like), -1))
