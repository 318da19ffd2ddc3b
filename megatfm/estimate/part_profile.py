"""Profile of one part of a model: the operators of its two passes, and the bytes that it saves between them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatfm.estimate.operators import Operator, Recording

SAVED_BY_SELECTIVE = ("mm", "addmm", "_scaled_mm", "attention")
"""Operators whose outputs selective recomputation saves. Where they are summed over ranks, it saves the sum alone."""

LONG_CHAIN = 100
"""Operators of a pointwise chain after which torch saves a result
(its `ban_recompute_long_fusible_chains`)."""


@dataclass(frozen=True)
class SavedTensor:
    """Storage that a forward pass saves for its backward pass. number: see `OperatorRecorder.number`; is_eager: by a
    module that stays eager in compiled blocks; shared_input: name of an input that all parts which read it share, such
    as an encoder's output."""

    number: int
    n_bytes: int
    is_eager: bool = False
    shared_input: str = ""


@dataclass(frozen=True)
class WeightGradient:
    """A weight's gradient when a backward pass has computed it. live: bytes of the pass then, without gradients;
    n_bytes: of the gradient, of all experts where `is_expert`; is_saved: the forward pass computed it, and it counts as
    saved."""

    live: int
    n_bytes: int
    is_expert: bool
    is_saved: bool = False


@dataclass(frozen=True)
class ExpertMoment:
    """Moment of a backward pass whose gradients are not reduced. live: bytes without those of experts, which are
    `expert_gradients` for all experts; is_reduced: those of experts are reduced, and no longer gathered."""

    live: int
    expert_gradients: int
    is_reduced: bool


def expert_moments(backward: Recording, gradients: Sequence[int], complete: int) -> list[ExpertMoment]:
    """Return the moments of a backward pass that may be the fullest for some number of ranks that share experts.

    gradients: numbers of those of experts; complete: operator before which they are all computed, and then reduced; 0:
    experts exchange no tokens.
    """
    created = [backward.created[number] for number in gradients if number in backward.created]
    if not created or not complete:
        return []
    live = backward.live_without(gradients)
    held = [sum(n_bytes for start, n_bytes in created if start <= index < complete) for index in range(len(live))]
    moments = [(held[index], index >= complete, n_bytes) for index, n_bytes in enumerate(live)]
    moments.append((held[complete - 1], True, live[complete - 1]))  # in their reduction
    fullest: dict[tuple[int, bool], int] = {}
    for expert_gradients, is_reduced, n_bytes in moments:
        key = expert_gradients, is_reduced
        fullest[key] = max(n_bytes, fullest.get(key, 0))
    return [ExpertMoment(n_bytes, *key) for key, n_bytes in fullest.items()]


@dataclass(frozen=True, eq=False)
class PartProfile:
    """Passes of a split point; equal to itself alone. input_bytes, output_bytes: of the activations that it reads and
    writes; shared_input_bytes: of those that it reads and does not write, which parts share.

    forward_peak, backward_peak: most bytes that a pass has live beside saved tensors, and beside gradients of weights;
    whole_backward_peak: with these. expert_moments: the fullest ones, if experts exchange tokens. gradients: in the
    order of the weights' names. is_block: it lies in a stack.
    """

    name: str
    forward: Sequence[Operator]
    backward: Sequence[Operator]
    saved: Sequence[SavedTensor]
    input_bytes: int
    output_bytes: int
    forward_peak: int
    backward_peak: int
    gradients: Sequence[WeightGradient]
    is_block: bool
    weight_numbers: frozenset[int] = frozenset()
    whole_backward_peak: int = 0
    expert_moments: Sequence[ExpertMoment] = ()
    shared_input_bytes: int = 0

    @cached_property
    def has_experts(self) -> bool:
        """Whether it runs grouped matmuls."""
        return any(op.name == "_grouped_mm" for op in self.forward)

    def unreduced_peak(self, ep: int, reducing: int, reducing_experts: int) -> int:
        """Return the most bytes that a backward pass has live if it keeps all gradients, but those of experts until
        they are reduced.

        ep: as below; reducing, reducing_experts: bytes in a reduce-scatter before and after the experts' gradients.
        """
        if not self.expert_moments:
            return self.whole_backward_peak + reducing
        return max(
            moment.live + moment.expert_gradients // ep + (reducing_experts if moment.is_reduced else reducing)
            for moment in self.expert_moments
        )

    def accumulation_peak(self, copies: float, expert_copies: float, ep: int) -> int:
        """Return the most bytes that a backward pass has live while a gradient is added to earlier ones.

        copies, expert_copies: of the gradient, as multiples of its bytes; ep: ranks that share the experts.
        """
        peaks = (
            g.live + ((expert_copies if g.is_expert else copies) - g.is_saved) * g.n_bytes / (ep if g.is_expert else 1)
            for g in self.gradients
        )
        return max(map(int, peaks), default=0)

    @cached_property
    def _own_saved(self) -> list[SavedTensor]:
        return [tensor for tensor in self.saved if not tensor.shared_input]

    @cached_property
    def shared_inputs(self) -> dict[str, int]:
        """Bytes of the saved inputs that other parts share, by name."""
        return {tensor.shared_input: tensor.n_bytes for tensor in self.saved if tensor.shared_input}

    def saved_bytes(self, recompute: str, compiled: bool) -> int:
        """Return the bytes that the part saves between its passes, without shared inputs. Only blocks recompute."""
        without_recompute = sum(tensor.n_bytes for tensor in self._own_saved)
        input_bytes = self.input_bytes - self.shared_input_bytes
        if not self.is_block:
            return without_recompute
        if recompute == "full":
            return input_bytes
        if recompute == "selective":
            sums = [op for op in self.forward if op.collective in ("all_reduce", "reduce_scatter")]
            saved = [op for op in self.forward if op.name in SAVED_BY_SELECTIVE] + sums
            written = {number: n_bytes for op in saved for number, n_bytes in op.writes.items()}
            if compiled:
                needed = self._find_needed(written)
                written = {number: n_bytes for number, n_bytes in written.items() if number in needed}
            terms = {number for op in sums for number in op.reads.keys() - op.writes.keys()}
            terms |= {tensor.number for tensor in self.saved if tensor.shared_input}
            return input_bytes + sum(n_bytes for number, n_bytes in written.items() if number not in terms)
        if recompute.endswith("%"):
            return int(self.compiled_bytes() * int(recompute[:-1].strip()) / 100)
        return self.compiled_bytes() if compiled else without_recompute

    def compiled_bytes(self) -> int:
        """Return the bytes that a compiled block saves, without shared inputs.

        torch's partitioner of forward and backward pass recomputes elementwise operators from their inputs, but not a
        result that a matmul or attention of the backward pass reads (`ban_recompute_materialized_backward` of
        torch/_functorch/config.py): it would be written to memory anyway. Nor does it recompute the end of a
        long chain, such as the hash of a dropout's mask. Experts stay eager.
        """
        producers, reads, chain_lengths = self._trace_pointwise_chains()
        materialized = {n for op in self.backward if op.kind != "pointwise" for n in op.reads}
        materialized |= {tensor.number for tensor in self.saved if tensor.is_eager}
        saved_by_number: dict[int, int] = {}
        queue = [(tensor.number, tensor.n_bytes) for tensor in self.saved]
        saved_numbers = {number for number, _ in queue}
        visited: set[int] = set()
        while queue:
            number, n_bytes = queue.pop()
            if number in visited:
                continue
            visited.add(number)
            producer = producers.get(number)
            is_small = number in saved_numbers and n_bytes <= self.input_bytes // 64
            is_recomputed = producer is not None and producer.kind == "pointwise" and number not in materialized
            if not is_recomputed or is_small or chain_lengths[number] > LONG_CHAIN:
                saved_by_number[number] = n_bytes
                continue
            queue += [(n, size) for n, size in reads[number].items() if n not in self.weight_numbers]
        for tensor in self.saved:
            if tensor.shared_input:
                saved_by_number.pop(tensor.number, None)
        return min(sum(saved_by_number.values()), sum(tensor.n_bytes for tensor in self._own_saved))

    def _find_needed(self, written: Collection[int]) -> set[int]:
        """Return those of some results from which the backward pass computes what it reads; a compiled block does not
        save the remaining ones, such as the output of its last matmul."""
        _, reads, _ = self._trace_pointwise_chains()
        queue = [tensor.number for tensor in self.saved]
        visited: set[int] = set()
        while queue:
            number = queue.pop()
            if number not in visited:
                visited.add(number)
                queue += () if number in written else reads.get(number, ())
        return visited.intersection(written)

    def _trace_pointwise_chains(self) -> tuple[dict[int, Operator], dict[int, dict[int, int]], dict[int, int]]:
        """Return, for each storage that the forward pass writes: the operator that wrote it first, all that its writers
        read, and how many operators after the first one of its pointwise chain it was written last."""
        producers: dict[int, Operator] = {}
        reads: dict[int, dict[int, int]] = {}
        starts: dict[int, int] = {}
        lengths: dict[int, int] = {}
        for index, op in enumerate(self.forward):
            inputs = {number: n_bytes for number, n_bytes in op.reads.items() if number not in op.writes}
            for number in op.writes:
                producers.setdefault(number, op)
                reads.setdefault(number, {}).update(inputs)
                known = [starts[n] for n in (*inputs, number) if n in starts]
                starts[number] = min([index, *known]) if op.kind == "pointwise" else index + 1
                lengths[number] = index - starts[number]
        return producers, reads, lengths


@dataclass(frozen=True)
class ModelProfile:
    """Profiles of all split points in order; blocks of a kind share one object. samples: features of a micro-batch that
    the loss compares; batch_bytes: of a micro-batch's fields."""

    parts: Sequence[PartProfile]
    samples: int
    batch_bytes: int


def add_shared_inputs(parts: Sequence[PartProfile], saved_bytes: Sequence[int]) -> list[int]:
    """Return the bytes that each part saves, with each shared input at the first part that saves it.

    saved_bytes: of each part, by `PartProfile.saved_bytes`.
    """
    counted: set[str] = set()
    sums = []
    for part, n_bytes in zip(parts, saved_bytes, strict=True):
        new_inputs = part.shared_inputs.keys() - counted
        sums.append(n_bytes + sum(part.shared_inputs[name] for name in new_inputs))
        counted |= new_inputs
    return sums
