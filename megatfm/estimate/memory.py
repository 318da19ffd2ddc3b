"""Memory of each pipeline rank: state, gathered weights, activations in flight, and what a pass has live besides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatfm.config import Config
from megatfm.estimate.part_profile import PartProfile
from megatfm.estimate.weights import LocalWeight, RankBytes, number_bytes, pending_bytes, rank_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the ranks of one pipeline rank, when a step holds most of them.

    weights: as the optimizer moves them; copies: those that the model computes with. workspace: what passes and
    reductions have live besides what is kept. reserved: CUDA, its libraries and fragments. by_phase: the sum at the
    fullest moment of "forward", "backward" and "optimizer".
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

    @property
    def total(self) -> int:
        """All of it."""
        state = self.weights + self.copies + self.gradients + self.optimizer
        return state + self.gathered + self.activations + self.workspace + self.reserved

    @property
    def largest(self) -> str:
        """The part that takes most."""
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
class _Peak:
    """A moment of a step: activations and workspace, and gradients that are there already."""

    phase: str
    activations: int
    workspace: int
    gradients: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.activations + self.workspace + self.gradients


def rank_memory(
    config: Config,
    weights: Sequence[LocalWeight],
    parts_by_stage: Mapping[int, Sequence[int]],
    profiles: Sequence[PartProfile],
    in_flight: Mapping[int, int],
    pipeline_rank: int,
    microbatches: int,
    *,
    compiled: bool,
    reserved: int,
) -> RankMemory:
    """Find the fullest moment of a rank's step. parts_by_stage: of this rank; in_flight: by stage."""
    parts = [index for indices in parts_by_stage.values() for index in indices]
    state = rank_bytes(config, weights, parts)
    mode = config.train.recompute
    saved_bytes = {index: profiles[index].kept_bytes(mode, compiled) for index in parts}
    elsewhere = sum(
        max(0, in_flight.get(stage, 1) - (place == 0)) * sum(saved_bytes[i] for i in indices)
        for place, (stage, indices) in enumerate(parts_by_stage.items())
    )
    running = next(iter(parts_by_stage.values()), ())
    one_pass = config.parallel.pp == 1 and microbatches == 1
    moments = _moments(config, weights, running, profiles, saved_bytes, state, one_pass, compiled)
    peak = max(moments, key=lambda moment: moment.bytes)
    always = state.at_rest + reserved
    in_passes = {moment.phase: moment.bytes for moment in sorted(moments, key=lambda one: one.bytes)}
    by_phase = {phase: always + state.gathered + elsewhere + n for phase, n in in_passes.items()}
    by_phase["optimizer"] = always + state.gradients
    return RankMemory(
        pipeline_rank,
        state.weights,
        state.copies,
        peak.gradients,
        state.optimizer,
        state.gathered,
        elsewhere + peak.activations,
        peak.workspace,
        reserved,
        by_phase,
    )


def _moments(
    config: Config,
    weights: Sequence[LocalWeight],
    parts: Sequence[int],
    profiles: Sequence[PartProfile],
    saved_bytes: Mapping[int, int],
    state: RankBytes,
    one_pass: bool,
    compiled: bool,
) -> list[_Peak]:
    """List the moments of a stage's two passes at which memory may be fullest.

    In a step of one micro-batch gradients come as activations go; else those of earlier ones are there.
    """
    moments, held = [], 0
    size, compute = number_bytes(config)
    copies = 1 + (size / compute if size > compute else 0)  # of a gradient: as computed, and its cast
    none_yet = 0 if one_pass else state.gradients
    for index in parts:
        moments.append(_Peak("forward", held + saved_bytes[index], profiles[index].forward_peak, none_yet))
        held += saved_bytes[index]
    trained = sum(w.local for w in weights if w.is_trained and set(w.parts) & set(parts)) or 1
    done = 0
    for index in reversed(parts):
        local = sum(w.local for w in weights if w.is_trained and index == w.parts[-1])
        done += local
        gradients = state.gradients if not one_pass else state.gradients * min(done, trained) // trained
        again = 0
        if profiles[index].is_block and config.train.recompute != "none":
            again = profiles[index].kept_bytes("none", compiled) - saved_bytes[index]
        pending = pending_bytes(config, weights, parts, index)
        passing = profiles[index].backward_peak
        if config.parallel.zero < 2:
            passing = max(passing, profiles[index].arrival_peak(copies, config.parallel.ep))
        workspace = passing + max(0, again) + state.unreduced + pending
        moments.append(_Peak("backward", held, workspace, gradients))
        held -= saved_bytes[index]
    return moments
