"""Bytes that collectives move: counted where torch dispatches them, and, to compare, what one rank should send.

By a ring of n ranks, for x bytes on each: all-gather of shards x: (n − 1)·x; reduce-scatter of x: (n − 1)/n·x;
all-reduce of x: 2(n − 1)/n·x (Korthikanti et al. 2022; Rajbhandari et al. 2020).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "recv_")


@dataclass(frozen=True)
class CollectiveTraffic:
    """Traffic of one kind of collective over one axis: calls, and bytes that this rank sends (by a ring)."""

    axis: str
    collective: str
    calls: int
    sent_bytes: int


class TrafficCounter(TorchDispatchMode):
    """While entered, counts the collectives of this thread. axes: process-group name → what to call it."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = dict(axes)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def flows(self) -> list[CollectiveTraffic]:
        """The collectives counted so far, sorted by axis and kind."""
        return [
            CollectiveTraffic(*key, calls, self._bytes[key]) for key, calls in sorted(self._calls.items())
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in NAMESPACES and name not in WAITS:
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            self._count(name, {**named, **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, arguments: Mapping[str, Any]) -> None:
        group = (
            ProcessGroup.unbox(arguments["process_group"])
            if "process_group" in arguments
            else _resolve_process_group(arguments["group_name"])
        )
        if group.size() == 1:
            return
        payload = next(value for key, value in arguments.items() if key.startswith(("input", "tensor")))
        collective, n_bytes = _ring(name, _bytes(payload), group.size(), group.rank(), arguments)
        key = self._axes.get(group.group_name, f"{group.size()} ranks"), collective
        self._calls[key] += 1
        self._bytes[key] += n_bytes


def _ring(
    name: str, payload_bytes: int, size: int, rank: int, arguments: Mapping[str, Any]
) -> tuple[str, int]:
    """The collective's plain name, and the bytes that a ring of `size` ranks makes each of them send."""
    plain = name.strip("_").replace("_base", "").replace("_into_tensor", "").replace("_tensor", "")
    plain = plain.removesuffix("_coalesced")
    plain = plain.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    plain = plain.replace("alltoall", "all_to_all").removesuffix("_single")
    if plain == "all_gather":
        return plain, payload_bytes * (size - 1)
    if plain == "all_reduce":
        return plain, 2 * payload_bytes * (size - 1) // size
    if plain == "reduce_scatter":
        return plain, payload_bytes * (size - 1) // size
    if plain == "all_to_all":
        splits = arguments.get("input_split_sizes") or [1] * size
        return plain, payload_bytes * (sum(splits) - splits[rank]) // max(1, sum(splits))
    return plain, payload_bytes


def _bytes(payload: Tensor | Iterable[Any]) -> int:
    if isinstance(payload, Tensor):
        return payload.numel() * payload.element_size()
    return sum(_bytes(item) for item in payload)


TrafficTable = dict[tuple[str, str], tuple[int, int]]
"""Axis and collective → calls and bytes sent."""


@dataclass
class ExpectedTraffic:
    """Traffic that one rank should cause, added up by axis and collective.

    sizes: ranks by axis; an axis of one rank sends nothing. group_names: axis → name of its process group.
    """

    sizes: Mapping[str, int]
    group_names: Mapping[str, str] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def all_gather(self, axis: str, shard_bytes: int, times: int = 1) -> None:
        """Add gathers by a ring; shard_bytes: what each rank holds before."""
        self._add(axis, "all_gather", shard_bytes * (self.sizes[axis] - 1), times)

    def reduce_scatter(self, axis: str, whole_bytes: int, times: int = 1) -> None:
        """Add such sums by a ring; whole_bytes: of the tensor before it is cut."""
        self._add(axis, "reduce_scatter", whole_bytes * (self.sizes[axis] - 1) // self.sizes[axis], times)

    def all_reduce(self, axis: str, whole_bytes: int, times: int = 1, among: int | None = None) -> None:
        """Add sums by a ring; among: how many of the axis's ranks take part, by default all."""
        ranks = among or self.sizes[axis]
        self._add(axis, "all_reduce", 2 * whole_bytes * (ranks - 1) // ranks, times)

    def all_to_all(self, axis: str, others_bytes: int, times: int = 1) -> None:
        """Add exchanges; others_bytes: what is sent to other ranks."""
        self._add(axis, "all_to_all", others_bytes, times)

    def send(self, axis: str, sent_bytes: int) -> None:
        """Add one message of this rank to a neighbour on the axis."""
        self._add(axis, "send", sent_bytes, 1)

    def _add(self, axis: str, collective: str, n_bytes: int, times: int) -> None:
        if self.sizes[axis] > 1 and times:
            axis = self.group_names.get(axis, axis)
            self.calls[axis, collective] += times
            self.sent[axis, collective] += n_bytes * times

    def flows(self) -> TrafficTable:
        """The calls and bytes added so far; what sent nothing has no entry."""
        return {key: (calls, self.sent[key]) for key, calls in self.calls.items()}
