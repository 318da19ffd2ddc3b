"""Memory of each pipeline rank: state, gathered weights, saved activations, and the workspace of a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatfm.config import Config
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.estimate.weights import (
    BUCKET_NUMEL,
    LocalWeight,
    RankBytes,
    list_buckets,
    number_bytes,
    pending_bytes,
    rank_bytes,
)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a GPU of one pipeline rank, at the fullest moment of a step.

    weights: in the optimizer's precision; copies: in the model's. workspace: live in passes and reductions beside saved
    activations. reserved: CUDA, its libraries and fragments. by_phase: the sum at the fullest moment of "forward",
    "backward" and "optimizer". saved_in_blocks: by the blocks of one micro-batch, between its passes.
    """

    pipeline_rank: int
    weights: int
    copies: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    workspace: int
    reserved: int
    by_phase: Mapping[str, int] = field(default_factory=dict)
    saved_in_blocks: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        state = self.weights + self.copies + self.gradients + self.optimizer
        return state + self.gathered + self.activations + self.workspace + self.reserved

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        sizes = {
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "weights": self.weights + self.copies,
            "gathered weights": self.gathered,
            "activations": self.activations,
            "workspace": self.workspace,
        }
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True)
class _Moment:
    """Bytes at a moment of a step: saved activations, workspace, and accumulated gradients."""

    phase: str
    activations: int
    workspace: int
    gradients: int

    @property
    def bytes(self) -> int:
        """Sum of all parts."""
        return self.activations + self.workspace + self.gradients


def rank_memory(
    config: Config,
    weights: Sequence[LocalWeight],
    parts_by_stage: Mapping[int, Sequence[int]],
    profiles: Sequence[PartProfile],
    in_flight: Mapping[int, int],
    sent_bytes: Mapping[int, int],
    pipeline_rank: int,
    microbatches: int,
    *,
    compiled: bool,
    reserved: int,
    kept_bytes: int = 0,
) -> RankMemory:
    """Estimate the fullest moment of a rank's step: while its first stage runs, and others wait for a backward pass.

    parts_by_stage: of this rank; in_flight: by stage; sent_bytes: by stage that sends to another rank. It keeps what it
    sent, at which its backward pass starts. kept_bytes: of batches and features, which a step keeps.
    """
    parts = [index for indices in parts_by_stage.values() for index in indices]
    state = rank_bytes(config, weights, parts)
    mode = config.train.recompute
    saved_bytes: dict[int, int] = {}
    for stage_parts in parts_by_stage.values():
        part_profiles = [profiles[index] for index in stage_parts]
        own_bytes = [profile.saved_bytes(mode, compiled) for profile in part_profiles]
        saved_bytes |= zip(stage_parts, add_shared_inputs(part_profiles, own_bytes), strict=True)
    waiting = kept_bytes + _sum_waiting(parts_by_stage, in_flight, sent_bytes, saved_bytes)
    running, running_stage = next(iter(parts_by_stage.items()), (0, ()))
    is_single_pass = config.parallel.pp == 1 and microbatches == 1
    stage_moments = partial(_moments, config, weights, running_stage, profiles, saved_bytes, state, compiled=compiled)
    moments = stage_moments(is_single_pass=is_single_pass)
    starts_full = len(parts_by_stage) == 1 and 1 < microbatches <= in_flight.get(running, 1)
    if config.parallel.effective_zero < 2 and starts_full:
        # All passes forward come first: the first one backward has no gradients yet, the second one less is waiting.
        freed = sum(saved_bytes[index] for index in running_stage)
        later = [moment for moment in moments if moment.phase == "backward"]
        moments = stage_moments(is_single_pass=True)
        moments += [replace(moment, activations=moment.activations - freed) for moment in later]
    peak = max(moments, key=lambda moment: moment.bytes)
    constant = state.at_rest + reserved
    phase_peaks = {moment.phase: moment.bytes for moment in sorted(moments, key=lambda moment: moment.bytes)}
    # The first micro-batch gathers, and later ones have gradients.
    gather_buffer = max(0, state.gather_buffer - (0 if is_single_pass else state.gradients))
    gathered = state.gathered + gather_buffer
    by_phase = {phase: constant + gathered + waiting + n for phase, n in phase_peaks.items()}
    exchanged = max(state.regathered, state.exchanged)
    by_phase["optimizer"] = constant + state.reduced + exchanged
    if by_phase["optimizer"] > max(by_phase.get(phase, 0) for phase in ("forward", "backward")):
        peak, gather_buffer, waiting = _Moment("optimizer", 0, exchanged, state.reduced), 0, 0
    return RankMemory(
        pipeline_rank,
        state.weights,
        state.copies,
        peak.gradients,
        state.optimizer,
        state.gathered if peak.phase != "optimizer" else 0,
        waiting + peak.activations,
        peak.workspace + gather_buffer,
        reserved,
        by_phase,
        sum(n_bytes for index, n_bytes in saved_bytes.items() if profiles[index].is_block),
    )


def _sum_waiting(
    parts_by_stage: Mapping[int, Sequence[int]],
    in_flight: Mapping[int, int],
    sent_bytes: Mapping[int, int],
    saved_bytes: Mapping[int, int],
) -> int:
    """Sum what a rank's stages keep for later backward passes, while its first stage runs: activations and outputs."""
    waiting = sum(
        max(0, in_flight.get(stage, 1) - (place == 0)) * sum(saved_bytes[i] for i in indices)
        for place, (stage, indices) in enumerate(parts_by_stage.items())
    )
    return waiting + sum(in_flight.get(stage, 1) * sent_bytes.get(stage, 0) for stage in parts_by_stage)


def _moments(
    config: Config,
    weights: Sequence[LocalWeight],
    parts: Sequence[int],
    profiles: Sequence[PartProfile],
    saved_bytes: Mapping[int, int],
    state: RankBytes,
    *,
    is_single_pass: bool,
    compiled: bool,
) -> list[_Moment]:
    """List the moments of a stage's two passes at which memory may be fullest."""
    moments, saved, zero = [], 0, config.parallel.effective_zero
    size, compute = number_bytes(config)
    reduces_in_pass = is_single_pass and zero == 1 and config.parallel.pp == 1
    copies, expert_copies = _count_copies(config, is_single_pass, reduces_in_pass)
    for index in parts:
        beyond = state.beyond_in_forward if profiles[index].is_block else state.beyond_outside
        forward_peak = max(0, profiles[index].forward_peak + beyond)
        gradients = 0 if is_single_pass else state.gradients
        moments.append(_Moment("forward", saved + saved_bytes[index], forward_peak, gradients))
        saved += saved_bytes[index]
    gradients_by_part = _count_gradients(config, weights, parts, state, is_single_pass, reduces_in_pass)
    reducing = 0  # bytes of the last block's gradients in a reduce-scatter
    reduces_at_once = zero >= 2 and not state.keeps_whole_gradients
    for index in reversed(parts):
        recomputed = 0
        if profiles[index].is_block and config.train.recompute != "none":
            without_recompute = profiles[index].saved_bytes("none", compiled)
            recomputed = max(0, without_recompute - profiles[index].saved_bytes(config.train.recompute, compiled))
        pending = pending_bytes(config, weights, parts, index)
        if zero < 2:
            accumulating = profiles[index].accumulation_peak(copies, expert_copies, config.parallel.ep)
            pass_peak = max(profiles[index].backward_peak, accumulating)
        else:
            experts = sum(w.local for w in weights if w.is_trained and w.is_expert and index == w.parts[0])
            reducing_experts = experts * size * reduces_at_once
            if zero == 3 and not config.parallel.splits_backward:
                reducing_experts -= experts * compute  # no longer gathered
            pass_peak = profiles[index].unreduced_peak(config.parallel.ep, reducing, reducing_experts)
        moments.append(_Moment("backward", saved, pass_peak + recomputed + pending, gradients_by_part[index]))
        saved -= saved_bytes[index]
        if zero >= 2 and profiles[index].is_block:
            block = sum(w.local for w in weights if w.is_trained and w.in_block and index == w.parts[0]) - experts
            reducing = block * size * reduces_at_once
            workspace = reducing + block * compute + profiles[index].input_bytes + pending
            moments.append(_Moment("backward", saved, workspace, gradients_by_part[index]))
    return moments


def _count_copies(config: Config, is_single_pass: bool, reduces_in_pass: bool) -> tuple[float, float]:
    """Return the most copies of a gradient beside the accumulated ones, as multiples of its bytes; the same of experts.

    It exists as computed and cast. In a single pass the cast becomes the accumulated gradient; that of experts is
    transposed, and copied into the weight's order.
    """
    size, compute = number_bytes(config)
    cast = size / compute if size > compute else 0.0
    if not is_single_pass:
        return 1.0 + cast, 1.0 + cast
    if not reduces_in_pass:
        return 1.0, cast or 1.0
    return 1.0 + cast, 2 * (cast or 1.0)


def _count_gradients(
    config: Config,
    weights: Sequence[LocalWeight],
    parts: Sequence[int],
    state: RankBytes,
    is_single_pass: bool,
    reduces_in_pass: bool,
) -> dict[int, int]:
    """Return the bytes of gradients while each part runs backward.

    Those of a single pass grow. If it reduces them, they are shards of complete buckets, those that wait for the rest
    of their bucket, and the part's own. A weight that fills a bucket by itself is taken to be the part's last one.
    """
    if not is_single_pass:
        return dict.fromkeys(parts, state.gradients)
    size, _ = number_bytes(config)
    trained = [w for w in weights if w.is_trained]
    n_trained = sum(w.local for w in trained if set(w.parts) & set(parts)) or 1
    n_complete = 0
    gradients = {}
    buckets = list_buckets(w for w in trained if w.parts[0] in parts)
    waiting: set[LocalWeight] = set()
    for index in reversed(parts):
        completed = [w for w in trained if index == w.parts[0]]  # complete at its first use
        small = {w for w in completed if w.local <= BUCKET_NUMEL}
        waiting |= small
        if reduces_in_pass:
            if len(small) < len(completed):
                _reduce_complete_buckets(buckets, waiting)
            n_waiting = sum(w.local for w in waiting)
            n_reduced = n_complete + sum(w.local for w in small) - n_waiting
            gradients[index] = state.reduced * n_reduced // n_trained + n_waiting * size
        waiting |= set(completed)
        _reduce_complete_buckets(buckets, waiting)
        n_complete += sum(w.local for w in completed)
        if not reduces_in_pass:
            gradients[index] = state.gradients * min(n_complete, n_trained) // n_trained
    return gradients


def _reduce_complete_buckets(buckets: list[list[LocalWeight]], waiting: set[LocalWeight]) -> None:
    """Remove the last buckets if all of their gradients are waiting, and these gradients."""
    while buckets and waiting.issuperset(buckets[-1]):
        waiting.difference_update(buckets.pop())
