"""Memory of each pipeline rank: state, gathered weights, saved activations, and the workspace of a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatfm.config import Config
from megatfm.estimate.moments import Moment, StageMemory
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.estimate.weights import LocalWeight, RankBytes, count_rank_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a GPU of one pipeline rank, at the fullest moment of a step."""

    pipeline_rank: int
    weights: int
    """Weights in the optimizer's precision."""
    copies: int
    """Weights in the model's precision, where it is another one."""
    gradients: int
    """Accumulated gradients."""
    optimizer: int
    """State of the optimizer."""
    gathered: int
    """Weights that ZeRO 2 and 3 gather."""
    activations: int
    """Activations saved for backward passes."""
    workspace: int
    """Live bytes of passes and reductions beside saved activations."""
    reserved: int
    """CUDA, its libraries and fragments."""
    by_phase: Mapping[str, int] = field(default_factory=dict)
    """The sum at the fullest moment of "forward", "backward" and "optimizer"."""
    saved_in_blocks: int = 0
    """Activations that the blocks of one micro-batch save."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        state = self.weights + self.copies + self.gradients + self.optimizer
        return state + self.gathered + self.activations + self.workspace + self.reserved

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by the names of parts in tables and drawings."""
        return {
            "weights": self.weights + self.copies,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered": self.gathered,
            "activations": self.activations,
            "workspace": self.workspace,
            "reserved": self.reserved,
        }

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        sizes = {name: n_bytes for name, n_bytes in self.parts.items() if name != "reserved"}
        name = max(sizes, key=lambda name: sizes[name])
        return {"optimizer": "optimizer state", "gathered": "gathered weights"}.get(name, name)


@dataclass(frozen=True)
class StepMemory:
    """A step of which the memory is estimated: what is the same on all ranks."""

    config: Config
    microbatches: int
    """Micro-batches of a rank."""
    weights: Sequence[LocalWeight]
    profiles: Sequence[PartProfile]
    """Profiles of the model's split points."""
    compiled: bool
    """Whether blocks are compiled."""
    reserved: int
    """Bytes that CUDA, its libraries and fragments take."""
    kept_bytes: int = 0
    """Bytes of batches and features, which a step keeps."""


@dataclass(frozen=True)
class RankStages:
    """Stages of a pipeline rank."""

    pipeline_rank: int
    parts: Mapping[int, Sequence[int]]
    """Stage → its split points."""
    in_flight: Mapping[int, int]
    """Stage → most micro-batches between their two passes."""
    sent_bytes: Mapping[int, int]
    """Stage → bytes of its output, if it goes to another rank: a stage keeps what it sent, as its backward pass starts
    there."""


def estimate_rank_memory(step: StepMemory, stages: RankStages) -> RankMemory:
    """Estimate the fullest moment of a rank's step.

    It is taken to be in a pass of the rank's first stage, while all others wait for a backward pass, or in the
    optimizer.
    """
    state = count_rank_bytes(step.config, step.weights, [index for parts in stages.parts.values() for index in parts])
    saved_bytes: dict[int, int] = {}
    for parts in stages.parts.values():
        profiles = [step.profiles[index] for index in parts]
        alone = [profile.count_saved_bytes(step.config.train.recompute, step.compiled) for profile in profiles]
        saved_bytes |= zip(parts, add_shared_inputs(profiles, alone), strict=True)
    waiting = step.kept_bytes + _sum_waiting(stages, saved_bytes)
    moments = _list_moments(step, stages, state, saved_bytes)
    peak = max(moments, key=lambda moment: moment.n_bytes)
    phase_peaks = {moment.phase: moment.n_bytes for moment in sorted(moments, key=lambda moment: moment.n_bytes)}
    # The first micro-batch gathers, and later ones have gradients.
    is_single_pass = step.config.parallel.pp == 1 and step.microbatches == 1
    gather_buffer = max(0, state.gather_buffer - (0 if is_single_pass else state.gradients))
    constant = state.at_rest + step.reserved
    by_phase = {phase: constant + state.gathered + gather_buffer + waiting + n for phase, n in phase_peaks.items()}
    exchanged = max(state.regathered, state.exchanged)
    by_phase["optimizer"] = constant + state.reduced + exchanged
    if by_phase["optimizer"] > max(by_phase.get(phase, 0) for phase in ("forward", "backward")):
        peak, gather_buffer, waiting = Moment("optimizer", 0, exchanged, state.reduced), 0, 0
    return RankMemory(
        pipeline_rank=stages.pipeline_rank,
        weights=state.weights,
        copies=state.copies,
        gradients=peak.gradients,
        optimizer=state.optimizer,
        gathered=state.gathered if peak.phase != "optimizer" else 0,
        activations=waiting + peak.activations + min(0, peak.workspace),
        workspace=max(0, peak.workspace) + gather_buffer,
        reserved=step.reserved,
        by_phase=by_phase,
        saved_in_blocks=sum(n_bytes for index, n_bytes in saved_bytes.items() if step.profiles[index].is_block),
    )


def _list_moments(
    step: StepMemory, stages: RankStages, state: RankBytes, saved_bytes: Mapping[int, int]
) -> list[Moment]:
    """List the moments of a rank's first stage; it may have none."""
    stage, parts = next(iter(stages.parts.items()), (0, ()))
    memory = StageMemory(step.config, step.weights, parts, step.profiles, saved_bytes, state, step.compiled)
    parallel = step.config.parallel
    if parallel.pp == 1 and step.microbatches == 1:
        return memory.list_moments(is_first=True, is_last=True)
    middle = memory.list_moments(is_first=False, is_last=False)
    starts_full = len(stages.parts) == 1 and 1 < step.microbatches <= stages.in_flight.get(stage, 1)
    if parallel.effective_zero < 2 and starts_full:
        # All passes forward come first: the first one backward has no gradients yet, the second one less is waiting.
        freed = sum(saved_bytes[index] for index in parts)
        later = [moment for moment in middle if moment.phase == "backward"]
        first = memory.list_moments(is_first=True, is_last=False)
        return first + [replace(moment, activations=moment.activations - freed) for moment in later]
    return middle + memory.list_moments(is_first=False, is_last=True)


def _sum_waiting(stages: RankStages, saved_bytes: Mapping[int, int]) -> int:
    """Sum what a rank's stages keep for later backward passes, while its first stage runs: activations and outputs."""
    waiting = sum(
        max(0, stages.in_flight.get(stage, 1) - (place == 0)) * sum(saved_bytes[index] for index in parts)
        for place, (stage, parts) in enumerate(stages.parts.items())
    )
    return waiting + sum(stages.in_flight.get(stage, 1) * stages.sent_bytes.get(stage, 0) for stage in stages.parts)
