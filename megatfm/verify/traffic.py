"""Traffic of collectives: counted where torch dispatches them, and added up by closed forms.

Bytes that a rank sends in a ring of n ranks: (n − 1)·x for an all-gather of shards of x bytes, (n − 1)/n·x for a
reduce-scatter and 2(n − 1)/n·x for an all-reduce of x bytes (Korthikanti et al. 2022; Rajbhandari et al. 2020).
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import Library

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "recv_")
COUNTING_KEY = "BackendSelect"
"""Dispatch key at which collectives are counted: after autograd and modes (selective recomputation runs few operators
again), before a backend. A `TorchDispatchMode` would see every operator, which doubles the time of a step."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Traffic of one kind of collective over one axis: calls, and bytes that a rank sends (in a ring)."""

    axis: str
    collective: str
    calls: int
    sent_bytes: int


class TrafficTally:
    """Adds up collectives. axes: process-group name → axis name."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = dict(axes)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def list_traffic(self) -> list[CollectiveTraffic]:
        """Return the traffic counted so far, sorted by axis and collective."""
        return [CollectiveTraffic(*key, calls, self._bytes[key]) for key, calls in sorted(self._calls.items())]

    def add_call(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count an operator's call if it sends anything."""
        if operator.namespace in NAMESPACES and (name := operator._schema.name.partition("::")[2]) not in WAITS:
            named = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False))
            self._count(name, {**named, **kwargs})

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


class TrafficCounter(TrafficTally):
    """Counts the collectives of this process while entered."""

    def __enter__(self) -> Self:
        if not _entered:
            _kernels.extend(_register_kernels())
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.remove(self)
        while _kernels and not _entered:
            _kernels.pop()._destroy()


_entered: list[TrafficCounter] = []
_kernels: list[Library] = []
_running = threading.local()
"""Its attribute `depth`: operators that a thread runs one inside another; functional collectives run others."""


def _register_kernels() -> Iterator[Library]:
    """Register kernels that count, for operators that send; yield what unregisters them."""
    for namespace in NAMESPACES:
        library = Library(namespace, "IMPL")
        for operator in _list_sending_operators(namespace):
            library.impl(operator, partial(_count_and_run, operator), COUNTING_KEY, with_keyset=True)
        yield library


@cache
def _list_sending_operators(namespace: str) -> list[Any]:
    """List a namespace's operators that send, once in a process: torch has thousands of names to look through."""
    operators = []
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.removeprefix(f"{namespace}::").partition(".")
        if full_name.startswith(f"{namespace}::") and name not in WAITS:
            operators.append(getattr(getattr(getattr(torch.ops, namespace), name), overload or "default"))
    return operators


def _count_and_run(operator: Any, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    depth = getattr(_running, "depth", 0)
    for counter in _entered if depth == 0 else ():
        counter.add_call(operator, args, kwargs)
    _running.depth = depth + 1
    try:
        later_keys = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        return operator.redispatch(keyset & later_keys, *args, **kwargs)
    finally:
        _running.depth = depth


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
