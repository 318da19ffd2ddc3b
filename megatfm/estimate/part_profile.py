"""Profile of one part of a model: the operators of its two passes, and the bytes that it keeps between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatfm.estimate.operators import Operator
from megatfm.split_points import SplitPoint

KEPT_BY_SELECTIVE = ("mm", "addmm", "_scaled_mm", "attention")
"""Operators whose outputs selective recomputation keeps, beside sums over tensor-parallel ranks."""


@dataclass(frozen=True)
class SavedTensor:
    """A storage that a pass keeps for its backward pass. number: see `OperatorRecorder.number`."""

    number: int
    n_bytes: int


@dataclass(frozen=True)
class Arrival:
    """A weight's gradient when a backward pass has computed it. live: bytes of the pass then, without gradients;
    n_bytes: of the gradient, of all experts where `is_expert`."""

    live: int
    n_bytes: int
    is_expert: bool


@dataclass(frozen=True)
class PartProfile:
    """A split point's passes. input_bytes: of the activations that come in; output_bytes: of those that go out.

    forward_peak, backward_peak: most bytes that a pass has live beside what is kept. arrivals: of gradients of weights.
    is_block: it lies in a stack.
    """

    name: str
    forward: Sequence[Operator]
    backward: Sequence[Operator]
    saved: Sequence[SavedTensor]
    input_bytes: int
    output_bytes: int
    forward_peak: int
    backward_peak: int
    arrivals: Sequence[Arrival]
    is_block: bool
    weight_numbers: frozenset[int] = frozenset()

    def arrival_peak(self, copies: float, ep: int) -> int:
        """Most bytes that a backward pass has live while a gradient is added to earlier ones. copies: of the gradient,
        in bytes as computed; ep: ranks that share the experts."""
        return max(
            (int(a.live + copies * a.n_bytes / (ep if a.is_expert else 1)) for a in self.arrivals), default=0
        )

    def kept_bytes(self, recompute: str, compiled: bool) -> int:
        """Bytes that the part keeps between its passes. Parts that are no blocks keep all in every mode."""
        everything = sum(tensor.n_bytes for tensor in self.saved)
        if not self.is_block:
            return everything
        if recompute == "full":
            return self.input_bytes
        if recompute == "selective":
            written = {
                number: n_bytes
                for operator in self.forward
                if operator.name in KEPT_BY_SELECTIVE
                or operator.collective in ("all_reduce", "reduce_scatter")
                for number, n_bytes in operator.writes.items()
            }
            return self.input_bytes + sum(written.values())
        if recompute.endswith("%"):
            return int(self.compiled_bytes() * int(recompute[:-1].strip()) / 100)
        return self.compiled_bytes() if compiled else everything

    def compiled_bytes(self) -> int:
        """Bytes that a compiled block keeps: what is made elementwise is made again from what that reads."""
        producers = {n: op for op in self.forward for n in op.writes}
        kept: dict[int, int] = {}
        waiting = [(tensor.number, tensor.n_bytes) for tensor in self.saved]
        seen: set[int] = set()
        while waiting:
            number, n_bytes = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            maker = producers.get(number)
            if maker is None or maker.kind != "pointwise" or n_bytes <= self.input_bytes // 64:
                kept[number] = n_bytes
                continue
            waiting += [(n, size) for n, size in maker.reads.items() if n not in self.weight_numbers]
        return min(sum(kept.values()), sum(tensor.n_bytes for tensor in self.saved))


@dataclass(frozen=True)
class ModelProfile:
    """Profiles of all split points, in their order; equal ones are the same object. layout: of the weights."""

    parts: Sequence[PartProfile]
    points: Sequence[SplitPoint]
