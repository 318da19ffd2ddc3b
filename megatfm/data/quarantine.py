"""Samples that a run must not read: they become padding, so that every other sample keeps its place."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import UsageError

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True)
class Quarantine:
    """Sorted, disjoint ranges (first, end) of sample numbers."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, entries: Sequence[str], n_samples: int) -> "Quarantine":
        """Of "17" and "120-153" (the last included); a UsageError if one is no such range of the corpus."""
        found = []
        for entry in entries:
            match = _RANGE.fullmatch(entry)
            first = int(match[1]) if match else 0
            last = int(match[2] or match[1]) if match else -1
            if not first <= last < n_samples:
                raise UsageError(
                    f"quarantine {entry!r}: give a sample such as '17', or a range such as '120-153', of the "
                    f"corpus's 0 to {n_samples - 1}"
                )
            found.append((first, last + 1))
        ranges: list[tuple[int, int]] = []
        for first, end in sorted(found):
            if ranges and first <= ranges[-1][1]:
                before, until = ranges.pop()
                first, end = before, max(end, until)
            ranges.append((first, end))
        return cls(tuple(ranges))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def mask(self, first: int, end: int) -> NDArray[np.bool_]:
        """Which of the samples first … end − 1 are in it [end − first]."""
        numbers = np.arange(first, end)
        at = np.searchsorted([begin for begin, _ in self.ranges], numbers, side="right") - 1
        ends = np.array([0, *(stop for _, stop in self.ranges)])
        return numbers < ends[at + 1]

    def __str__(self) -> str:
        return ",".join(f"{first}-{end - 1}" for first, end in self.ranges)
