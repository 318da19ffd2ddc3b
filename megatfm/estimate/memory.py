"""Memory of each pipeline rank: state, gathered weights, saved activations, and the workspace of a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatfm.config import Config
from megatfm.estimate.moments import Moment, StageMemory
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.estimate.schedule import RunningPass
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
            "optimizer state": self.optimizer,
            "gathered weights": self.gathered,
            "activations": self.activations,
            "workspace": self.workspace,
            "reserved": self.reserved,
        }

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        sizes = {name: n_bytes for name, n_bytes in self.parts.items() if name != "reserved"}
        return max(sizes, key=lambda name: sizes[name])


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
    passes: Sequence[RunningPass]
    """Passes that the rank runs."""
    sent_bytes: Mapping[int, int]
    """Stage → bytes of its output, if it goes to another rank: a stage keeps what it sent, as its backward pass starts
    there."""


def estimate_rank_memory(step: StepMemory, stages: RankStages) -> RankMemory:
    """Estimate the fullest moment of a rank's step: in a pass of one of its stages, or in the optimizer."""
    state = count_rank_bytes(step.config, step.weights, [index for parts in stages.parts.values() for index in parts])
    saved_bytes: dict[int, int] = {}
    for parts in stages.parts.values():
        profiles = [step.profiles[index] for index in parts]
        alone = [profile.count_saved_bytes(step.config.train.recompute, step.compiled) for profile in profiles]
        saved_bytes |= zip(parts, add_shared_inputs(profiles, alone), strict=True)
    moments = _list_moments(step, stages, state, saved_bytes)
    peak = max(moments, key=lambda moment: moment.n_bytes)
    phase_peaks = {moment.phase: moment.n_bytes for moment in sorted(moments, key=lambda moment: moment.n_bytes)}
    constant = state.at_rest + step.reserved
    by_phase = {phase: constant + state.gathered + n_bytes for phase, n_bytes in phase_peaks.items()}
    exchanged = max(state.regathered, state.exchanged)
    by_phase["optimizer"] = constant + state.reduced + exchanged
    if by_phase["optimizer"] > max(by_phase.get(phase, 0) for phase in ("forward", "backward")):
        peak = Moment("optimizer", 0, exchanged, state.reduced)
    return RankMemory(
        pipeline_rank=stages.pipeline_rank,
        weights=state.weights,
        copies=state.copies,
        gradients=peak.gradients,
        optimizer=state.optimizer,
        gathered=state.gathered if peak.phase != "optimizer" else 0,
        activations=peak.activations + min(0, peak.workspace),
        workspace=max(0, peak.workspace),
        reserved=step.reserved,
        by_phase=by_phase,
        saved_in_blocks=sum(n_bytes for index, n_bytes in saved_bytes.items() if step.profiles[index].is_block),
    )


def _list_moments(
    step: StepMemory, stages: RankStages, state: RankBytes, saved_bytes: Mapping[int, int]
) -> list[Moment]:
    """List the moments of a rank's passes, with what waits for later backward passes: activations and outputs."""
    moments = []
    memories = {
        stage: StageMemory(step.config, step.weights, parts, step.profiles, saved_bytes, state, step.compiled)
        for stage, parts in stages.parts.items()
    }
    for running in stages.passes:
        waiting_bytes = step.kept_bytes + stages.sent_bytes.get(running.stage, 0)
        for stage, parts in stages.parts.items():
            saved = sum(saved_bytes[index] for index in parts) + stages.sent_bytes.get(stage, 0)
            kept_gradients = sum(step.profiles[index].kept_gradients for index in parts)
            waiting_bytes += running.waiting[stage] * saved + running.half_done[stage] * (saved + kept_gradients)
        for moment in memories[running.stage].list_moments(running, is_alone=len(stages.parts) == 1):
            moments.append(replace(moment, activations=moment.activations + waiting_bytes))
    return moments
