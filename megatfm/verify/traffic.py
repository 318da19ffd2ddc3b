"""Traffic of collectives: counted where torch dispatches them, and added up by closed forms.

Bytes that a rank sends in a ring of n ranks: (n − 1)·x for an all-gather of shards of x bytes, (n − 1)/n·x for a
reduce-scatter and 2(n − 1)/n·x for an all-reduce of x bytes (Korthikanti et al. 2022; Rajbhandari et al. 2020).
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
    """Traffic of one kind of collective over one axis: calls, and bytes that a rank sends (in a ring)."""

    axis: str
    collective: str
    calls: int
    sent_bytes: int


class TrafficCounter(TorchDispatchMode):
    """Counts the collectives of this thread while entered. axes: process-group name → axis name."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = dict(axes)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def list_traffic(self) -> list[CollectiveTraffic]:
        """Return the traffic counted so far, sorted by axis and collective."""
        return [CollectiveTraffic(*key, calls, self._bytes[key]) for key, calls in sorted(self._calls.items())]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in NAMESPACES and (name := func._schema.name.partition("::")[2]) not in WAITS:
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
        collective, n_bytes = _count_ring_bytes(name, _count_bytes(payload), group.size(), group.rank(), arguments)
        key = self._axes.get(group.group_name, f"{group.size()} ranks"), collective
        self._calls[key] += 1
        self._bytes[key] += n_bytes


def _count_ring_bytes(
    name: str, payload_bytes: int, size: int, rank: int, arguments: Mapping[str, Any]
) -> tuple[str, int]:
    """Return the collective's common name and the bytes that each rank of a ring sends."""
    collective = name.strip("_").replace("_base", "").replace("_into_tensor", "").replace("_tensor", "")
    collective = collective.removesuffix("_coalesced")
    collective = collective.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    collective = collective.replace("alltoall", "all_to_all").removesuffix("_single")
    if collective == "all_gather":
        return collective, payload_bytes * (size - 1)
    if collective == "all_reduce":
        return collective, 2 * payload_bytes * (size - 1) // size
    if collective == "reduce_scatter":
        return collective, payload_bytes * (size - 1) // size
    if collective == "all_to_all":
        splits = arguments.get("input_split_sizes") or [1] * size
        return collective, payload_bytes * (sum(splits) - splits[rank]) // max(1, sum(splits))
    return collective, payload_bytes


def _count_bytes(payload: Tensor | Iterable[Any]) -> int:
    if isinstance(payload, Tensor):
        return payload.numel() * payload.element_size()
    return sum(_count_bytes(item) for item in payload)


TrafficTable = dict[tuple[str, str], tuple[int, int]]
"""Axis and collective → calls and bytes sent."""


@dataclass
class ExpectedTraffic:
    """Expected traffic of one rank, added up by axis and collective.

    sizes: axis → ranks; collectives over one rank send nothing. group_names: axis → name to count it under.
    """

    sizes: Mapping[str, int]
    group_names: Mapping[str, str] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def all_gather(self, axis: str, shard_bytes: int, times: int = 1) -> None:
        """Add `times` all-gathers of shards of `shard_bytes`."""
        self._add(axis, "all_gather", shard_bytes * (self.sizes[axis] - 1), times)

    def reduce_scatter(self, axis: str, full_bytes: int, times: int = 1) -> None:
        """Add `times` reduce-scatters; full_bytes: of the tensor before it is scattered."""
        self._add(axis, "reduce_scatter", full_bytes * (self.sizes[axis] - 1) // self.sizes[axis], times)

    def all_reduce(self, axis: str, full_bytes: int, times: int = 1, n_ranks: int | None = None) -> None:
        """Add `times` all-reduces; n_ranks: participants, by default all ranks of the axis."""
        ranks = n_ranks or self.sizes[axis]
        self._add(axis, "all_reduce", 2 * full_bytes * (ranks - 1) // ranks, times)

    def all_to_all(self, axis: str, sent_bytes: int, times: int = 1) -> None:
        """Add `times` all-to-alls; sent_bytes: to other ranks."""
        self._add(axis, "all_to_all", sent_bytes, times)

    def send(self, axis: str, sent_bytes: int) -> None:
        """Add one point-to-point message."""
        self._add(axis, "send", sent_bytes, 1)

    def _add(self, axis: str, collective: str, n_bytes: int, times: int) -> None:
        if self.sizes[axis] > 1 and times:
            axis = self.group_names.get(axis, axis)
            self.calls[axis, collective] += times
            self.sent[axis, collective] += n_bytes * times

    def to_table(self) -> TrafficTable:
        """Return the traffic added so far; collectives without traffic have no entry."""
        return {key: (calls, self.sent[key]) for key, calls in self.calls.items()}
