"""How a row's tokens are dealt to the ranks of a context, and what carries keys and values between these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.moved import moved

LENGTHS = 64
"""For so many lengths of rows, where their tokens go is remembered: a batch schedule has fewer, evaluation one more."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share rows, and how these are cut.

    is_zigzag: of rows of a length, whether a rank has a run from the front and its mirror image from the back, so that
    causal attention is equally much on all (zig-zag); else one run. multiple_of: tokens that stay together, so that
    sequence parallelism divides them.
    method: of full attention, "ring", "ulysses", or "auto", by what is sent.
    """

    group: ProcessGroup
    is_zigzag: Callable[[int], bool] = lambda length: False
    multiple_of: int = 1
    method: str = "auto"

    @property
    def size(self) -> int:
        """How many ranks share a row."""
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        """This process's number among them."""
        return dist.get_rank(self.group)

    def token_indices(self, length: int) -> list[Tensor]:
        """By rank, where its tokens stand in a row of so many, ascending; some have one unit more than others.

        Raises UsageError if there are not enough for all.
        """
        return [*token_indices(length, self.size, self.is_zigzag(length), self.multiple_of)]


@lru_cache(LENGTHS)
def token_indices(length: int, ranks: int, folded: bool, unit: int = 1) -> tuple[Tensor, ...]:
    """See `Contexts.places`."""
    runs, units = ranks * (1 + folded), length // unit
    if units < runs:
        raise UsageError(
            f"a row of {length} tokens can't be cut into {runs} runs of at least {unit} for parallel.cp = {ranks}: "
            "make rows longer, or cp smaller"
        )
    bounds = [i * units // runs * unit for i in range(runs)] + [length]
    each = [torch.arange(bounds[i], bounds[i + 1]) for i in range(runs)]
    return tuple(torch.cat([each[r], each[-1 - r]]) for r in range(ranks)) if folded else tuple(each)


class P2PExchange:
    """Tensors on their way to and from other ranks; `wait` gives what came."""

    def __init__(
        self, group: ProcessGroup, sent: Sequence[tuple[int, Tensor]], came: Sequence[tuple[int, Tensor]]
    ):
        self._kept, self._came = [tensor.contiguous() for _, tensor in sent], [tensor for _, tensor in came]
        post: Callable[..., Any] = dist.P2POp
        operations = [
            post(dist.isend, tensor, group=group, group_peer=peer)
            for (peer, _), tensor in zip(sent, self._kept, strict=True)
        ]
        operations += [post(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in came]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """What came, in the order in which it was asked for."""
        for work in self._works:
            work.wait()
        self._kept = []
        return self._came


@dataclass(frozen=True)
class FetchPlan:
    """Which tokens of a row each rank needs keys and values of besides its own: what travels, both ways.

    gives[r]: numbers, among this rank's tokens, of those that rank r needs. gets[r]: places of tokens of rank r that
    are needed here. indices: all places that are looked at here, ascending; permutation: where each of these lies in
    [own, what came from rank 0, 1, …]. most: tokens that a rank gets, of all ranks; length: tokens of the row.
    """

    contexts: ContextParallel
    send_indices: list[Tensor]
    recv_indices: list[Tensor]
    indices: Tensor
    permutation: Tensor
    most: int
    length: int

    @classmethod
    def of(
        cls, contexts: ContextParallel, dealt: Sequence[Tensor], needed_indices: Sequence[Tensor]
    ) -> "FetchPlan":
        """dealt: places by rank; needs[r]: sorted places whose keys rank r looks at."""
        me, nobody = contexts.rank, torch.empty(0, dtype=torch.int64)
        here, ranks = dealt[me], range(contexts.size)
        length = sum(map(len, dealt))
        is_needed = torch.zeros(len(dealt), length, dtype=torch.bool)
        for r in ranks:
            is_needed[r, needed_indices[r]] = True
        most = max(len(needed_indices[r]) - int(is_needed[r, dealt[r]].sum()) for r in ranks)
        gives = [is_needed[r, here].nonzero()[:, 0] if r != me else nobody for r in ranks]
        gets = [dealt[r][is_needed[me, dealt[r]]] if r != me else nobody for r in ranks]
        looked_at, order = torch.cat([here, *gets]).sort()
        return cls(contexts, gives, gets, looked_at, order, most, length)


def is_little(dealt: Sequence[Tensor], needs: Sequence[Tensor]) -> bool:
    """Whether no rank needs half of what the others have. dealt: places by rank; needs[r]: places whose keys rank r
    looks at, its own among them."""
    ranks, length = len(dealt), sum(map(len, dealt))
    most = max(len(need) - len(at) for need, at in zip(needs, dealt, strict=True))
    return 2 * most * ranks < (ranks - 1) * length


class _Fetch(torch.autograd.Function):
    """[B, K, T, ·] → [B, K, tokens looked at, ·]; adjoint: gradients go back, and are added up at home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: FetchPlan) -> Tensor:
        ctx.wanted = wanted
        group = wanted.contexts.group
        sent = [(r, x[:, :, moved(at, x.device)]) for r, at in enumerate(wanted.send_indices) if len(at)]
        came = [(r, _empty(x, len(at))) for r, at in enumerate(wanted.recv_indices) if len(at)]
        parts = P2PExchange(group, sent, came).wait()
        return torch.cat([x, *parts], 2)[:, :, moved(wanted.permutation, x.device)]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        wanted = ctx.wanted
        sizes = [len(at) for at in wanted.recv_indices]
        laid = torch.empty_like(g)
        laid[:, :, moved(wanted.permutation, g.device)] = g
        own, *parts = laid.split([g.shape[2] - sum(sizes), *sizes], 2)
        sent = [(r, part) for r, part in enumerate(parts) if sizes[r]]
        givers = [(r, at) for r, at in enumerate(wanted.send_indices) if len(at)]
        came = P2PExchange(wanted.contexts.group, sent, [(r, _empty(g, len(at))) for r, at in givers]).wait()
        own = own.clone()
        for (_, at), part in zip(givers, came, strict=True):
            own.index_add_(2, moved(at, g.device), part)
        return own, None


def _empty(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(*like.shape[:2], tokens, *like.shape[3:])


def fetch(x_BKTH: Tensor, wanted: FetchPlan) -> Tensor:
    """Keys or values of the tokens here → those of all that are looked at, in the order of their places."""
    made: Tensor = _Fetch.apply(x_BKTH, wanted)
    return made
