"""Memory in the two passes of a pipeline stage: the moments at which it may be the fullest.

Under ZeRO 0 and 1, gradients are accumulated unsharded, and the last pass of a step reduces them bucket by bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatfm.config import Config
from megatfm.estimate.part_profile import PartProfile, WeightGradient
from megatfm.estimate.schedule import RunningPass
from megatfm.estimate.weights import LocalWeight, RankBytes, count_pending_bytes, get_item_sizes, list_buckets


@dataclass(frozen=True)
class Moment:
    """Bytes at a moment of a step, beside the state."""

    phase: str
    """"forward", "backward" or "optimizer"."""
    activations: int
    """Saved activations."""
    workspace: int
    """Live bytes of the pass beside saved activations: fewer than 0 once the pass has freed many of them."""
    gradients: int
    """Accumulated gradients."""

    @property
    def n_bytes(self) -> int:
        """Sum of all parts."""
        return self.activations + self.workspace + self.gradients


@dataclass(frozen=True)
class StageMemory:
    """A pipeline stage on a rank."""

    config: Config
    weights: Sequence[LocalWeight]
    """Weights of the model."""
    parts: Sequence[int]
    """Split points of the stage."""
    profiles: Sequence[PartProfile]
    """Profiles of the model's split points."""
    saved_bytes: Mapping[int, int]
    """Split point → bytes that it saves between its passes."""
    state: RankBytes
    """State of the rank."""
    compiled: bool
    """Whether blocks are compiled."""

    @property
    def _regathers(self) -> bool:
        """Whether each pass gathers weights anew."""
        return self.config.parallel.effective_zero == 3 and not self.config.parallel.splits_backward

    def list_moments(self, running: RunningPass, *, is_alone: bool) -> list[Moment]:
        """List the moments of a pass. is_alone: the rank has no other stage."""
        parallel = self.config.parallel
        if running.is_forward:
            return list(self._iter_forward_moments(running.is_first))
        is_first = running.is_first and is_alone  # else gradients of other stages count as if they were there
        if parallel.effective_zero >= 2:
            return list(self._iter_sharded_backward_moments(is_first, running.is_last and parallel.pp == 1))
        # Pipelines reduce after all passes, and without sharding nothing is freed.
        reduces = running.is_last and parallel.effective_zero == 1 and parallel.pp == 1
        return list(self._iter_backward_moments(is_first, reduces))

    def _iter_forward_moments(self, is_first: bool) -> Iterator[Moment]:
        """Yield the moments of a forward pass. is_first: no backward pass has left gradients or, under ZeRO 2, gathered
        weights."""
        saved, last_block = 0, max(self._list_blocks(), default=None)
        gradients = 0 if is_first else self.state.gradients
        gather_buffer = self.state.gather_buffer
        if self._regathers:  # first outside of blocks, copied out of the buffer
            yield Moment("forward", saved, gather_buffer, gradients)
        if self._regathers or not is_first:
            gather_buffer = 0
        for index in self.parts:
            profile = self.profiles[index]
            excess = self.state.forward_excess if profile.is_block else self.state.outside_excess
            excess -= self.state.prefetched * (index == last_block)
            workspace = max(0, profile.forward_peak + excess) + profile.unsaved_input_bytes + gather_buffer
            saved += self.saved_bytes[index]
            yield Moment("forward", saved, workspace, gradients)

    def _iter_backward_moments(self, is_first: bool, reduces: bool) -> Iterator[Moment]:
        """Yield the moments of a backward pass under ZeRO 0 and 1."""
        accumulation = GradientAccumulation(
            self.config, self.weights, self.parts, self.state, is_first=is_first, is_last=reduces
        )
        other_stages = self.state.gradients - accumulation.total_bytes  # bytes of their gradients
        saved = sum(self.saved_bytes[index] for index in self.parts)
        for index, waiting in self._list_waiting():
            profile, recomputed = self.profiles[index], self._count_recomputed(index)
            eager, saved_by_part = (profile.count_saved_bytes("none", compiled) for compiled in (False, self.compiled))
            unsaved = max(0, eager - saved_by_part)
            for live, gradients in accumulation.run_backward(index, profile, unsaved, compiled=self.compiled):
                yield Moment("backward", saved, live + recomputed + waiting, gradients + other_stages)
            saved += self._count_kept(index)

    def _iter_sharded_backward_moments(self, is_first: bool, is_last: bool) -> Iterator[Moment]:
        """Yield the moments of a backward pass under ZeRO 2 and 3, which reduce the gradients of a block at its end.

        A block's gathered weights are freed before that, under ZeRO 2 in the last pass of a step alone.
        """
        config, state = self.config, self.state
        size, compute, _ = get_item_sizes(config)
        reduces_at_once = not state.keeps_whole_gradients
        regathers = self._regathers
        frees = regathers or (config.parallel.effective_zero == 2 and is_last)
        freed = 0  # bytes of gathered weights: of the blocks that are computed, or those that no block is left to need
        reducing = 0  # bytes of the last block's gradients in a reduce-scatter
        saved = sum(self.saved_bytes[index] for index in self.parts)
        first_block = min(self._list_blocks(), default=None)
        for index, waiting in self._list_waiting():
            profile = self.profiles[index]
            gradients = self._count_sharded_gradients(index) if is_first else state.gradients
            pending = count_pending_bytes(config, self.weights, self.parts, index) + waiting
            experts = self._count_trained(index, is_expert=True)
            reducing_experts = experts * size * reduces_at_once
            if regathers:
                reducing_experts -= experts * compute  # no longer gathered
            if regathers and index == first_block:  # copied out of the buffer that it was gathered into
                yield Moment("backward", saved, reducing + profile.input_bytes + pending, gradients)
            if regathers and profile.is_block:
                freed = state.prefetched * (index == first_block)
            peak = profile.compute_unreduced_peak(config.parallel.ep, reducing, reducing_experts)
            yield Moment("backward", saved, peak + self._count_recomputed(index) + pending - freed, gradients)
            saved += self._count_kept(index)
            if profile.is_block:
                block = self._count_trained(index, is_expert=False)
                freed += (block + experts) * compute * frees
                reducing = block * size * reduces_at_once
                workspace = reducing + block * compute + profile.input_bytes + pending
                yield Moment("backward", saved, workspace - freed, gradients)

    def _list_blocks(self) -> list[int]:
        return [index for index in self.parts if self.profiles[index].is_block]

    def _list_waiting(self) -> Iterator[tuple[int, int]]:
        """Yield the parts in the order of a backward pass, each with the bytes of gradients of activations that later
        parts have computed and that earlier ones need, such as those of an encoder's output."""
        waiting: dict[str, int] = {}
        for index in reversed(self.parts):
            profile = self.profiles[index]
            waiting = {name: n_bytes for name, n_bytes in waiting.items() if name not in profile.writes}
            yield index, sum(waiting.values())
            waiting |= profile.waiting_gradients

    def _count_kept(self, index: int) -> int:
        """Return the bytes that a part's backward pass adds to those saved: the first half of a split one frees none,
        and the others free those of the part."""
        splits = self.config.parallel.splits_backward
        return self.profiles[index].kept_gradients if splits else -self.saved_bytes[index]

    def _count_recomputed(self, index: int) -> int:
        """Return the bytes that a part's recomputation makes anew for its backward pass."""
        profile, mode = self.profiles[index], self.config.train.recompute
        if not profile.is_block or mode == "none":
            return 0
        return max(0, profile.count_saved_bytes("none", self.compiled) - profile.count_saved_bytes(mode, self.compiled))

    def _count_trained(self, index: int, *, is_expert: bool) -> int:
        """Return the elements of a block's trained weights: of experts on several ranks, or of the others."""
        return sum(
            w.local
            for w in self.weights
            if w.is_trained and w.parts[0] == index and (w.is_expert if is_expert else w.in_block and not w.is_expert)
        )

    def _count_sharded_gradients(self, index: int) -> int:
        """Return the bytes of gradients in a step's first pass while a part runs backward: those of later blocks. Those
        outside of blocks are reduced at the end of the pass."""
        trained = [w for w in self.weights if w.is_trained and set(w.parts) & set(self.parts)]
        numel = sum(w.local for w in trained) or 1
        n_complete = sum(w.local for w in trained if w.in_block and w.parts[0] > index)
        return self.state.gradients * n_complete // numel


class GradientAccumulation:
    """Gradients of a stage's weights while its parts run backward, the last one first.

    A gradient is computed in the model's precision, cast to the stored one, and added to that of earlier passes. One of
    a weight with several uses, such as a tied table, waits until all uses have run. In the last pass of a step, a
    bucket whose gradients are complete is packed and reduce-scattered, which leaves a shard (see
    `engines.native.replicated`).
    """

    def __init__(
        self,
        config: Config,
        weights: Sequence[LocalWeight],
        parts: Sequence[int],
        state: RankBytes,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """is_first: there are no gradients of earlier passes; is_last: the pass reduces gradients."""
        self._parallel, self._state, self._is_first = config.parallel, state, is_first
        self._size, compute, self._buffer_size = get_item_sizes(config)
        self._cast = self._size / compute if self._size > compute else 0.0
        self._uses = {
            w: uses for w in weights if w.is_trained and (uses := sorted(index for index in w.parts if index in parts))
        }
        self._numel = sum(w.local for w in self._uses)
        self._n_added = 0 if is_first else self._numel
        self._n_reduced = 0
        self._waiting: set[LocalWeight] = set()
        self._complete: set[LocalWeight] = set()
        self._buckets = list_buckets(self._uses) if is_last else []

    @property
    def n_bytes(self) -> int:
        """Bytes of gradients now: whole ones, those that wait for other uses, and shards."""
        n_whole = self._n_added + sum(w.local for w in self._waiting)
        return n_whole * self._size + self._state.reduced * self._n_reduced // max(1, self._numel)

    @property
    def total_bytes(self) -> int:
        """Bytes of the unsharded gradients of all weights of the stage."""
        return self._numel * self._size

    def run_backward(
        self, index: int, profile: PartProfile, unsaved: int, *, compiled: bool
    ) -> Iterator[tuple[int, int]]:
        """Run a part: yield its fullest moments, as live bytes of the pass and bytes of gradients.

        unsaved: bytes that the part as compiled does not save, and the profiled one saves and frees.
        """
        weights = [w for w in self._uses if index in w.parts]
        if compiled and profile.is_block and not any(gradient.is_expert for gradient in profile.gradients):
            yield from self._run_compiled(index, weights, profile, unsaved)
        else:
            for gradient in profile.gradients:
                yield gradient.peak, self.n_bytes
                yield gradient.live + self._count_copies(gradient), self.n_bytes
                live = gradient.live - (0 if gradient.is_expert else gradient.n_bytes)
                yield from self._add(weights[gradient.place], index, live)
        for weight in weights:  # without a profiled gradient
            yield from self._add(weight, index, 0)
        yield profile.peak_after_gradients, self.n_bytes

    def _run_compiled(
        self, index: int, weights: Sequence[LocalWeight], profile: PartProfile, unsaved: int
    ) -> Iterator[tuple[int, int]]:
        """Run a compiled block, which returns all gradients at its end; then all are cast, and added."""
        yield profile.whole_backward_peak, self.n_bytes
        live = profile.peak_after_gradients + unsaved
        computed = sum(gradient.n_bytes for gradient in profile.gradients)
        yield live + int(computed * max(1.0, self._cast)), self.n_bytes
        for weight in weights:
            yield from self._add(weight, index, live)

    def _count_copies(self, gradient: WeightGradient) -> int:
        """Return the bytes of a gradient's copies when it is added: cast, and for experts transposed."""
        if not gradient.is_expert:
            return int(self._cast * gradient.n_bytes)
        copies = 2 * (self._cast or 1.0) if self._is_first else 1.0 + self._cast
        return int(copies * gradient.n_bytes / self._parallel.ep)

    def _add(self, weight: LocalWeight, index: int, live: int) -> Iterator[tuple[int, int]]:
        """Add a gradient; yield the moments at which buckets are packed. live: of the pass."""
        if weight in self._complete:
            return
        if index > self._uses[weight][0]:
            self._waiting.add(weight)
            return
        self._waiting.discard(weight)
        self._complete.add(weight)
        if self._is_first:
            self._n_added += weight.local
        while self._buckets and self._complete.issuperset(self._buckets[-1]):
            numel = sum(w.local for w in self._buckets.pop())
            yield live + numel * self._buffer_size, self.n_bytes
            self._n_added -= numel
            self._n_reduced += numel
