"""Gradients in a backward pass of ZeRO 0 and 1: added up in whole, and reduced in buckets by a step's last pass."""

from collections.abc import Iterator, Sequence

from megatfm.config import Config
from megatfm.estimate.part_profile import PartProfile, WeightGradient
from megatfm.estimate.weights import LocalWeight, RankBytes, get_item_sizes, list_buckets


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
