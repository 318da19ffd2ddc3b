"""Bytes that collectives move, counted where torch dispatches them: it shares nothing with styles or engine."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "recv_")


@dataclass(frozen=True)
class CollectiveTraffic:
    """What one kind of collective moved over one axis: calls, and bytes that this rank sends (by a ring)."""

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
        given = next(value for key, value in arguments.items() if key.startswith(("input", "tensor")))
        collective, sent = _ring(name, _bytes(given), group.size(), group.rank(), arguments)
        key = self._axes.get(group.group_name, f"{group.size()} ranks"), collective
        self._calls[key] += 1
        self._bytes[key] += sent


def _ring(name: str, given: int, size: int, rank: int, arguments: Mapping[str, Any]) -> tuple[str, int]:
    """The collective's plain name, and the bytes that a ring of `size` ranks makes each of them send."""
    plain = name.strip("_").replace("_base", "").replace("_into_tensor", "").replace("_tensor", "")
    plain = plain.removesuffix("_coalesced")
    plain = plain.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    plain = plain.replace("alltoall", "all_to_all").removesuffix("_single")
    if plain == "all_gather":
        return plain, given * (size - 1)
    if plain == "all_reduce":
        return plain, 2 * given * (size - 1) // size
    if plain == "reduce_scatter":
        return plain, given * (size - 1) // size
    if plain == "all_to_all":
        splits = arguments.get("input_split_sizes") or [1] * size
        return plain, given * (sum(splits) - splits[rank]) // max(1, sum(splits))
    return plain, given


def _bytes(given: Tensor | Iterable[Any]) -> int:
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(_bytes(item) for item in given)
