"""Context parallelism: splits the tokens of rows over ranks, and fetches tokens from other ranks.

Each rank of the `cp` axis holds a contiguous chunk of every row. Under causal attention, whose cost grows with the
position, it holds one chunk from the front and the mirror-image chunk from the back (zig-zag). Attention that needs few
tokens of other ranks fetches their keys (`FetchPlan`); `context_attention.py` lists the alternatives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.transfer import move_to_device
from megatfm.parallel.mesh import CONTEXT, TENSOR, Mesh

# B batch, K key-value heads, T tokens of a rank, H head width

MAX_CACHED_LENGTHS = 64
"""Number of row lengths whose split is cached; a batch schedule has fewer."""


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share rows, and how rows are split over them.

    is_zigzag: row length → whether a rank holds a chunk from the front and one from the back, which balances causal
    attention; otherwise it holds one chunk. multiple_of: chunk lengths are multiples of this, so that sequence
    parallelism can divide them. method: of full attention: "ring", "ulysses", or "auto", whichever sends less.
    """

    group: ProcessGroup
    is_zigzag: Callable[[int], bool] = lambda length: False
    multiple_of: int = 1
    method: str = "auto"

    @property
    def size(self) -> int:
        """Number of ranks that share a row."""
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def token_indices(self, length: int) -> list[Tensor]:
        """Return each rank's token indices in a row of `length`, ascending. Chunks differ by at most one unit.

        Raises UsageError for a row that is too short to give every rank a chunk.
        """
        return [*compute_token_indices(length, self.size, self.is_zigzag(length), self.multiple_of)]


@lru_cache(MAX_CACHED_LENGTHS)
def compute_token_indices(length: int, ranks: int, is_zigzag: bool, unit: int = 1) -> tuple[Tensor, ...]:
    """Return each rank's token indices. unit: chunk lengths are multiples of it."""
    n_chunks, n_units = ranks * (1 + is_zigzag), length // unit
    if n_units < n_chunks:
        raise UsageError(
            f"a row of {length} tokens can't be cut into {n_chunks} chunks of at least {unit} for parallel.cp = "
            f"{ranks}: make rows longer, or cp smaller"
        )
    bounds = [i * n_units // n_chunks * unit for i in range(n_chunks)] + [length]
    chunks = [torch.arange(bounds[i], bounds[i + 1]) for i in range(n_chunks)]
    if not is_zigzag:
        return tuple(chunks)
    return tuple(torch.cat([chunks[r], chunks[-1 - r]]) for r in range(ranks))


def build_context_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, method: str
) -> ContextParallel | None:
    """Build the context-parallel group of a model's rows; None without context parallelism."""
    if mesh.size(CONTEXT) == 1:
        return None
    unit = mesh.size(TENSOR) if sequence_parallel else 1
    return ContextParallel(mesh.group(CONTEXT), make_zigzag_predicate(model), unit, method)


def make_zigzag_predicate(model: nn.Module) -> Callable[[int], bool]:
    """Return a function: row length → whether the split should be zig-zag.

    It should if later tokens attend to more keys than earlier ones, also in a window as wide as the row.
    """
    patterns = dict.fromkeys(
        pattern for module in model.modules() if (pattern := getattr(module, "pattern", None)) is not None
    )
    return lru_cache(MAX_CACHED_LENGTHS)(partial(_has_uneven_work, [*patterns]))


def _has_uneven_work(patterns: Sequence[Any], length: int) -> bool:
    """Return whether the cost of any pattern grows with the position; False for patterns that don't declare it."""
    simplified = (getattr(pattern, "simplify", lambda _, pattern=pattern: pattern)(length) for pattern in patterns)
    return any(getattr(pattern, "has_uneven_work", False) for pattern in simplified)


SIDES = ("", "encoder_")
"""Prefixes of the fields of a row."""

FULL_ROW_FIELDS = (
    "tokens",
    "positions",
    "documents",
    "prefix",
    "targets",
    "order",
    "segments",
    "span_left",
    "span_right",
    "grid",
    "examples",
    "parts",
    "answer_marks",
    "source",
)
"""Fields of which every rank keeps the full row, to know which tokens each rank needs."""

Batch = dict[str, Tensor]


def split_batch(batch: Mapping[str, Tensor], cp: ContextParallel) -> Batch:
    """Split a micro-batch: return each field at this rank's tokens, and the full rows that attention needs.

    Raises UsageError for a field with neither one value per row nor one per token.
    """
    split = dict(batch)
    for side in SIDES:
        positions = batch.get(f"{side}positions")
        if positions is None:
            continue
        length = positions.shape[1]
        local_indices = move_to_device(cp.token_indices(length)[cp.rank], positions.device)
        for name, values in batch.items():
            if values.dim() < 2 or name.startswith("encoder_") != bool(side):
                continue
            if values.shape[1] != length:
                raise UsageError(
                    f"parallel.cp > 1: the objective's field {name!r} {list(values.shape)} does not have one value "
                    f"for each of {length} tokens, and can't be split with them: use parallel.cp = 1"
                )
            split[name] = values[:, local_indices]
        split[f"{side}token_indices"] = local_indices
        for name in FULL_ROW_FIELDS:
            if side + name in batch:
                split[f"{side}full_row_{name}"] = batch[side + name]
    return split


class P2PExchange:
    """Asynchronous sends to and receives from other ranks, in one batch."""

    def __init__(
        self, group: ProcessGroup, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Start the transfers. sends: (peer rank, tensor). receives: (peer rank, buffer)."""
        self._send_buffers = [tensor.contiguous() for _, tensor in sends]
        self._received = [tensor for _, tensor in receives]
        post: Callable[..., Any] = dist.P2POp
        operations = [
            post(dist.isend, tensor, group=group, group_peer=peer)
            for (peer, _), tensor in zip(sends, self._send_buffers, strict=True)
        ]
        operations += [post(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
        self._handles = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """Wait for all transfers; return the received tensors in the order of `receives`."""
        for handle in self._handles:
            handle.wait()
        self._send_buffers = []
        return self._received


@dataclass(frozen=True)
class FetchPlan:
    """Plan of which tokens' keys (or other values) each rank sends to and receives from the others.

    send_indices[r]: local indices of the tokens that rank r needs. recv_indices[r]: row indices of the tokens that come
    from rank r. indices: sorted row indices of all tokens after the fetch. permutation: sorts [local, received from
    rank 0, 1, …] into `indices`. max_fetched: the largest number of tokens that a rank receives. length: tokens of the
    row.
    """

    cp: ContextParallel
    send_indices: list[Tensor]
    recv_indices: list[Tensor]
    indices: Tensor
    permutation: Tensor
    max_fetched: int
    length: int
    _copies: dict[torch.device, tuple[list[Tensor], Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def copy_to(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Return `send_indices` and `permutation` on a device; all layers share the copies."""
        if device not in self._copies:
            sends = [move_to_device(indices, device) for indices in self.send_indices]
            self._copies[device] = sends, move_to_device(self.permutation, device)
        return self._copies[device]

    @classmethod
    def build(
        cls, cp: ContextParallel, indices_by_rank: Sequence[Tensor], needed_indices: Sequence[Tensor]
    ) -> "FetchPlan":
        """Plan from the tokens of each rank, and the sorted tokens that each rank attends to."""
        rank, no_indices = cp.rank, torch.empty(0, dtype=torch.int64)
        local, ranks = indices_by_rank[rank], range(cp.size)
        length = sum(map(len, indices_by_rank))
        is_needed = torch.zeros(cp.size, length, dtype=torch.bool)
        for r in ranks:
            is_needed[r, needed_indices[r]] = True
        max_fetched = max(len(needed_indices[r]) - int(is_needed[r, indices_by_rank[r]].sum()) for r in ranks)
        send = [is_needed[r, local].nonzero()[:, 0] if r != rank else no_indices for r in ranks]
        recv = [indices_by_rank[r][is_needed[rank, indices_by_rank[r]]] if r != rank else no_indices for r in ranks]
        indices, permutation = torch.cat([local, *recv]).sort()
        return cls(cp, send, recv, indices, permutation, max_fetched, length)


def make_fetch_all_plan(cp: ContextParallel, length: int) -> FetchPlan:
    """Plan a fetch of all tokens of a row to all ranks."""
    return FetchPlan.build(cp, cp.token_indices(length), [torch.arange(length)] * cp.size)


def is_sparse_fetch(indices_by_rank: Sequence[Tensor], needed_indices: Sequence[Tensor]) -> bool:
    """Return whether every rank needs less than half of the other ranks' tokens.

    needed_indices[r]: row indices of the tokens that rank r attends to, including its own.
    """
    ranks, length = len(indices_by_rank), sum(map(len, indices_by_rank))
    max_sent = max(len(needed) - len(local) for needed, local in zip(needed_indices, indices_by_rank, strict=True))
    return 2 * max_sent * ranks < (ranks - 1) * length


def fetch(x_BKTH: Tensor, plan: FetchPlan) -> Tensor:
    """Return [B, K, ·, ·] at `plan.indices`, from this rank's tokens [B, K, T, ·] and those of other ranks.

    The backward pass sends gradients back and adds them up.
    """
    fetched: Tensor = _Fetch.apply(x_BKTH, plan)
    return fetched


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: FetchPlan) -> Tensor:
        ctx.plan = plan
        send_indices, permutation = plan.copy_to(x.device)
        sends = [(r, x[:, :, indices]) for r, indices in enumerate(send_indices) if len(indices)]
        receives = [(r, _allocate_like(x, len(i))) for r, i in enumerate(plan.recv_indices) if len(i)]
        received = P2PExchange(plan.cp.group, sends, receives).wait()
        return torch.cat([x, *received], 2)[:, :, permutation]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        plan: FetchPlan = ctx.plan
        send_indices, permutation = plan.copy_to(g.device)
        sizes = [len(indices) for indices in plan.recv_indices]
        by_source = torch.empty_like(g)
        by_source[:, :, permutation] = g
        local_grad, *received_grads = by_source.split([g.shape[2] - sum(sizes), *sizes], 2)
        sends = [(r, grad) for r, grad in enumerate(received_grads) if sizes[r]]
        users = [(r, indices) for r, indices in enumerate(send_indices) if len(indices)]
        receives = [(r, _allocate_like(g, len(indices))) for r, indices in users]
        returned = P2PExchange(plan.cp.group, sends, receives).wait()
        local_grad = local_grad.clone()
        for (_, indices), grad in zip(users, returned, strict=True):
            local_grad.index_add_(2, indices, grad)
        return local_grad, None


def _allocate_like(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(*like.shape[:2], tokens, *like.shape[3:])
