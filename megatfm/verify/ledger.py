"""What one rank should send, added up by axis and collective.

By a ring of n ranks, for x bytes on each: all-gather of shards x: (n − 1)·x; reduce-scatter of x: (n − 1)/n·x;
all-reduce of x: 2(n − 1)/n·x (Korthikanti et al. 2022; Rajbhandari et al. 2020).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

TrafficTable = dict[tuple[str, str], tuple[int, int]]
"""Axis and collective → calls and bytes sent."""


@dataclass
class ExpectedTraffic:
    """sizes: ranks by axis; an axis of one rank sends nothing. group_names: axis → the name by which it is entered."""

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
        """among: how many of the axis's ranks take part; left out: all of them."""
        ranks = among or self.sizes[axis]
        self._add(axis, "all_reduce", 2 * whole_bytes * (ranks - 1) // ranks, times)

    def all_to_all(self, axis: str, others_bytes: int, times: int = 1) -> None:
        """others_bytes: what is sent to other ranks."""
        self._add(axis, "all_to_all", others_bytes, times)

    def send(self, axis: str, sent_bytes: int) -> None:
        """Add one message of this rank to a neighbour on the axis."""
        self._add(axis, "send", sent_bytes, 1)

    def _add(self, axis: str, collective: str, sent: int, times: int) -> None:
        if self.sizes[axis] > 1 and times:
            axis = self.group_names.get(axis, axis)
            self.calls[axis, collective] += times
            self.sent[axis, collective] += sent * times

    def flows(self) -> TrafficTable:
        """The calls and bytes added so far; what sent nothing has no entry."""
        return {key: (calls, self.sent[key]) for key, calls in self.calls.items()}
