"""Profile of one part of a model: the kernels of its two passes, and the bytes that it saves between them.

A part is what a split point runs, such as a block or the head. `profile.py` makes profiles; `moments.py` adds up the
memory of a rank from them, `part_time.py` its time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatfm.estimate.operators import COPIES, Operator, Recording

SAVED_BY_SELECTIVE = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "attention")
"""Operators whose outputs selective recomputation saves. Where they are summed over ranks, it saves the sum alone."""

WRITES_PART_INPUT = ("rms_norm", "native_layer_norm", "clone")
"""Operators between the parts of a block that is compiled around eager modules: norms, and copies of heads."""

LONG_CHAIN = 100
"""Operators of a pointwise chain after which torch saves a result (its `ban_recompute_long_fusible_chains`)."""


@dataclass(frozen=True)
class SavedTensor:
    """Storage that a forward pass saves for its backward pass."""

    number: int
    """Number of the storage (see `OperatorRecorder.number`)."""
    n_bytes: int
    is_eager: bool = False
    """Whether a module saves it that stays eager in compiled blocks."""
    shared_input: str = ""
    """Name of the input that it is, if all parts that read the input share it, such as an encoder's output."""


@dataclass(frozen=True)
class WeightGradient:
    """Gradient that a backward pass computes, and then adds to that of earlier passes.

    Live bytes are those of the pass beside the tensors saved for it, of which it frees more and more. They include
    gradients that are not added yet, but no experts' gradients, which `parallel.ep` divides.
    """

    place: int
    """Place of the weight among the trained ones of its part."""
    n_bytes: int
    """Bytes as computed; those of all experts where `is_expert`."""
    live: int
    """Live bytes when the gradient is added."""
    peak: int
    """Most live bytes since the gradient before was added."""
    is_expert: bool = False


def list_weight_gradients(
    backward: Recording, gradients: Mapping[int, tuple[int, int]], experts: Collection[int]
) -> tuple[list[WeightGradient], int]:
    """Return the gradients of a backward pass in the order in which they are added, and the most live bytes after them.

    gradients: storage → place and bytes; experts: those of experts. A gradient is added after the last call that makes
    a view of it. The forward pass may have computed it: then it counts as saved.
    """
    added = {number: backward.last_calls.get(number, 0) for number in gradients}
    created = backward.created | {number: (0, gradients[number][1]) for number in gradients.keys() - backward.created}
    live = replace(backward, created=created).live_until(
        {number: -1 if number in experts and number in backward.created else last for number, last in added.items()}
    )
    listed, start = [], 0
    for number, last in sorted(added.items(), key=lambda item: item[1]):
        place, n_bytes = gradients[number]
        at = backward.created[number][0] if number in experts and number in backward.created else last
        peak = max(live[start : last + 1], default=0)
        listed.append(WeightGradient(place, n_bytes, live[at] if live else 0, peak, number in experts))
        start = last
    return listed, max(live[start + 1 :], default=live[-1] if live else 0)


@dataclass(frozen=True)
class ExpertMoment:
    """Moment of a backward pass under ZeRO 2 and 3 that keeps all gradients but those of experts."""

    live: int
    """Live bytes with all gradients but those of experts."""
    expert_gradients: int
    """Bytes of the experts' gradients: those of all experts, which ranks share."""
    is_reduced: bool
    """Whether the experts' gradients are reduced by then, and their weights no longer gathered."""


def list_expert_moments(backward: Recording, gradients: Sequence[int], complete: int) -> list[ExpertMoment]:
    """Return the moments of a backward pass that may be the fullest for some number of ranks that share experts.

    gradients: storages of the experts' gradients. complete: index of the call before which all of them are computed;
    then they are reduced. It is 0 where experts exchange no tokens.
    """
    created = [backward.created[number] for number in gradients if number in backward.created]
    if not created or not complete:
        return []
    live = backward.live_without(gradients)
    expert_bytes = [
        sum(n_bytes for start, n_bytes in created if start <= index < complete) for index in range(len(live))
    ]
    moments = [(expert_bytes[index], index >= complete, n_bytes) for index, n_bytes in enumerate(live)]
    moments.append((expert_bytes[complete - 1], True, live[complete - 1]))  # in their reduction
    fullest: dict[tuple[int, bool], int] = {}
    for expert_gradients, is_reduced, n_bytes in moments:
        key = expert_gradients, is_reduced
        fullest[key] = max(n_bytes, fullest.get(key, n_bytes))
    return [ExpertMoment(n_bytes, *key) for key, n_bytes in fullest.items()]


def count_kept_gradients(backward: Recording, gradients: Collection[int], stored: Collection[int]) -> int:
    """Return the bytes that the first half of a split backward pass keeps for the second, beside saved tensors: the
    gradients of which those of weights are computed.

    gradients: storages of weights' gradients. stored: those of weights and of saved tensors.
    """
    computed, read = set(gradients), dict[int, int]()
    for op in reversed(backward.operators):
        if not computed.isdisjoint(op.writes) or op.name == "rms_norm":  # whose gradients are of no recorded operator
            if op.name in COPIES:
                computed |= op.reads.keys()
            else:
                read |= op.reads
    return sum(n_bytes for number, n_bytes in read.items() if number not in stored and number not in computed)


@dataclass(frozen=True, eq=False)
class PartProfile:
    """Passes of a split point; equal to itself alone."""

    name: str
    """Name of the split point."""
    forward: Sequence[Operator]
    """Kernels of the forward pass."""
    backward: Sequence[Operator]
    """Kernels of the backward pass."""
    saved: Sequence[SavedTensor]
    """Tensors that the forward pass saves for the backward pass."""
    input_bytes: int
    """Bytes of the activations that it reads."""
    output_bytes: int
    """Bytes of the activations that it writes."""
    forward_peak: int
    """Most live bytes of the forward pass beside saved tensors."""
    backward_peak: int
    """Most live bytes of the backward pass beside gradients of weights."""
    gradients: Sequence[WeightGradient]
    """Gradients of weights, in the order in which they are added to those of earlier passes."""
    is_block: bool
    """Whether it is a block of a stack."""
    weight_numbers: frozenset[int] = frozenset()
    """Storages of the model's weights."""
    whole_backward_peak: int = 0
    """Most live bytes of the backward pass with all gradients of weights."""
    peak_after_gradients: int = 0
    """Most live bytes of the backward pass after the last gradient was added."""
    expert_moments: Sequence[ExpertMoment] = ()
    """Fullest moments of the backward pass, if experts exchange tokens."""
    shared_input_bytes: int = 0
    """Bytes of the activations that it reads and does not write: parts share them, such as an encoder's output."""
    waiting_gradients: Mapping[str, int] = field(default_factory=dict)
    """Bytes of gradients of inputs that it reads and does not write, by name: they wait until the part that writes the
    input runs backward."""
    writes: frozenset[str] = frozenset()
    """Names of the activations that it writes."""
    unsaved_input_bytes: int = 0
    """Bytes of the activations that it reads and does not save: they are live in the forward pass alone."""
    kept_gradients: int = 0
    """Bytes that the first half of a split backward pass keeps for the second, beside saved tensors."""

    @cached_property
    def has_experts(self) -> bool:
        """Whether it runs grouped matmuls."""
        return any(op.name == "_grouped_mm" for op in self.forward)

    def compute_unreduced_peak(self, ep: int, reducing: int, reducing_experts: int) -> int:
        """Return the most live bytes of a backward pass that keeps all gradients of dense weights, and those of experts
        until they are reduced.

        ep: ranks that share the experts. reducing: bytes in a reduce-scatter until the experts' gradients are reduced;
        reducing_experts: from then on.
        """
        if not self.expert_moments:
            return self.whole_backward_peak + reducing
        return max(
            moment.live + moment.expert_gradients // ep + (reducing_experts if moment.is_reduced else reducing)
            for moment in self.expert_moments
        )

    @cached_property
    def _own_saved(self) -> list[SavedTensor]:
        return [tensor for tensor in self.saved if not tensor.shared_input]

    @cached_property
    def shared_inputs(self) -> dict[str, int]:
        """Bytes of the saved inputs that other parts share, by name."""
        return {tensor.shared_input: tensor.n_bytes for tensor in self.saved if tensor.shared_input}

    def count_saved_bytes(self, recompute: str, compiled: bool) -> int:
        """Return the bytes that the part saves between its passes, without shared inputs. Only blocks recompute."""
        without_recompute = sum(tensor.n_bytes for tensor in self._own_saved)
        input_bytes = self.input_bytes - self.shared_input_bytes
        if not self.is_block:
            return without_recompute
        if recompute == "full":
            return input_bytes
        if recompute == "selective":
            sums = [op for op in self.forward if op.collective in ("all_reduce", "reduce_scatter")]
            saved = [op for op in self.forward if op.name in SAVED_BY_SELECTIVE or op.collective == "all_to_all"] + sums
            written = {number: n_bytes for op in saved for number, n_bytes in op.writes.items()}
            if compiled:
                needed = self._find_needed(written) | {n for op in saved if op.is_eager for n in op.writes}
                written = {number: n_bytes for number, n_bytes in written.items() if number in needed}
                written |= self._list_part_inputs()
            terms = {number for op in sums for number in op.reads.keys() - op.writes.keys()}
            terms |= {tensor.number for tensor in self.saved if tensor.shared_input}
            return input_bytes + sum(n_bytes for number, n_bytes in written.items() if number not in terms)
        if recompute.endswith("%"):
            return int(self.count_compiled_bytes() * int(recompute[:-1].strip()) / 100)
        return self.count_compiled_bytes() if compiled else without_recompute

    def count_compiled_bytes(self) -> int:
        """Return the bytes that a compiled block saves, without shared inputs.

        torch's partitioner recomputes elementwise operators from their inputs, with two exceptions. It saves a result
        that a matmul or attention of the backward pass reads, as that would be written to memory anyway
        (`ban_recompute_materialized_backward` of torch/_functorch/config.py). It also saves the end of a long chain,
        such as the hash of a dropout's mask. Experts stay eager, and so does attention under context parallelism.
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

    def _list_part_inputs(self) -> dict[int, int]:
        """Return the inputs that parts save under "selective", by storage, if the block is compiled in parts."""
        if not any(op.is_eager for op in self.forward):
            return {}
        read = {number for op in self.forward if op.kind == "matmul" or op.is_eager for number in op.reads}
        writers = [op for op in self.forward if op.name in WRITES_PART_INPUT and not op.is_eager]
        return {number: n_bytes for op in writers for number, n_bytes in op.writes.items() if number in read}

    def _find_needed(self, written: Collection[int]) -> set[int]:
        """Return the results that the backward pass needs, directly or for a recomputation.

        written: results of the forward pass. A compiled block does not save the others, such as its last matmul's.
        """
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
        """Trace the storages that the forward pass writes. Return three mappings by storage: the operator that writes
        it first, the storages that its writers read, and the length of the pointwise chain that ends in it."""
        producers: dict[int, Operator] = {}
        reads: dict[int, dict[int, int]] = {}
        starts: dict[int, int] = {}
        lengths: dict[int, int] = {}
        for index, op in enumerate(self.forward):
            inputs = {number: n_bytes for number, n_bytes in op.reads.items() if number not in op.writes}
            for number in op.writes:
                producers.setdefault(number, op)
                reads.setdefault(number, {}).update(inputs)
                input_starts = [starts[n] for n in (*inputs, number) if n in starts]
                starts[number] = min([index, *input_starts]) if op.kind == "pointwise" else index + 1
                lengths[number] = index - starts[number]
        return producers, reads, lengths


@dataclass(frozen=True)
class ModelProfile:
    """Profiles of a model's parts at one micro-batch."""

    parts: Sequence[PartProfile]
    """Profile of each split point, in order. Blocks of a kind share one object."""
    samples: int
    """Features of a micro-batch that a contrastive loss compares; else 0."""
    batch_bytes: int
    """Bytes of a micro-batch's fields."""


def add_shared_inputs(parts: Sequence[PartProfile], saved_bytes: Sequence[int]) -> list[int]:
    """Return the bytes that each part saves, with each shared input at the first part that saves it.

    saved_bytes: of each part, by `PartProfile.count_saved_bytes`.
    """
    counted: set[str] = set()
    sums = []
    for part, n_bytes in zip(parts, saved_bytes, strict=True):
        new_inputs = part.shared_inputs.keys() - counted
        sums.append(n_bytes + sum(part.shared_inputs[name] for name in new_inputs))
        counted |= new_inputs
    return sums
