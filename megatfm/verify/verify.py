"""The comparison: loss, gradient norm, every gradient and update, a layout's against one process's; also of presets."""

import gc
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config import Config, load_config
from megatfm.engines.interface import PRECISIONS
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.layout import Chunk
from megatfm.registry import import_plugins
from megatfm.train.build import build_model
from megatfm.verify.expected import expected_flows, unpredicted
from megatfm.verify.layouts import LAYOUTS, ONE
from megatfm.verify.rank_processes import RankResult, RankTeam
from megatfm.verify.reference import ReferenceStep, plain_step, plain_weights, reference_step
from megatfm.verify.shrink import Documents, random_batch, shrink
from megatfm.verify.traffic import CollectiveTraffic, TrafficTable

BlocksOfOne = Sequence[tuple[Chunk, NDArray[np.floating[Any]]]]
"""A rank's blocks of one parameter."""


@dataclass(frozen=True)
class Limits:
    """bound: the largest error of a gradient that rounding can explain, with room to spare. relative_floor: a
    gradient smaller than this share of all gradients is measured against that share: some are zero in theory."""

    bound: float
    relative_floor: float


LIMITS = {"fp64": Limits(bound=1e-9, relative_floor=1e-6), "fp32": Limits(bound=1e-5, relative_floor=1e-3)}
"""By the precision that the layout's engine computes in."""


@dataclass(frozen=True)
class Difference:
    """A number of the layout against the same of the single process. error is relative; NaN counts as wrong."""

    name: str
    error: float
    norm: float
    shape: tuple[int, ...]
    bound: float

    @property
    def is_wrong(self) -> bool:
        """Whether the error is above `bound`, or NaN."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class GradientComparison:
    """All differences, the worst first, and what the step moved."""

    config: Config
    shrunk: list[str]
    gradients: list[Difference]
    updates: list[Difference]
    """Differences in what the optimizer adds to each weight, given the layout's own gradients."""
    loss: Difference
    grad_norm: Difference
    flows: list[CollectiveTraffic]
    expected: TrafficTable
    """Axis and collective → calls and bytes by the closed forms, for the rank that sends most."""
    axes_without_closed_form: Mapping[str, str]
    """Axis → why there is no closed form for it."""
    traffic_mismatches: Sequence[str] = ()
    """Flows that are not as expected, on any rank."""

    @property
    def bound(self) -> float:
        """Above which a difference is wrong."""
        return self.loss.bound

    @property
    def wrong(self) -> list[Difference]:
        """Numbers that differ by more than rounding: of loss, gradient norm, gradients and updates; no flows."""
        return [
            comparison
            for comparison in (self.loss, self.grad_norm, *self.gradients, *self.updates)
            if comparison.is_wrong
        ]


def verify(
    config: Config, documents: Documents = "mixed", team: RankTeam | None = None
) -> GradientComparison:
    """Take one step of a shrunk config on one process, in float64, and under its layout, on the CPU; there in float32
    if its engine has no float64. documents: the kind of documents in each row. team: rank processes to use; left out,
    they start and end here.

    Raises UsageError for a layout that can't be, MegatfmError naming the rank when one fails or hangs.
    """
    import_plugins(config.plugins)
    small, shrunk = shrink(config)
    batch = random_batch(small, documents)
    step = reference_step(small, batch)
    if team:
        answers = team.step(small, batch)
    else:
        with RankTeam() as team:
            answers = team.step(small, batch)
    limits = LIMITS[small.train.precision]
    unpredicted_axes = unpredicted(small)
    by_rank = [
        {key: flow for key, flow in flows.items() if key[0] not in unpredicted_axes}
        for flows in expected_flows(small, batch)
    ]
    return GradientComparison(
        config=small,
        shrunk=shrunk,
        gradients=gradient_differences(step.gradients, answers, limits),
        updates=update_differences(small, answers, limits),
        loss=_worst("loss", [answer.loss for answer in answers], step.loss, limits),
        grad_norm=_worst("gradient norm", [answer.grad_norm for answer in answers], step.grad_norm, limits),
        flows=_busiest_rank(answers),
        expected=_max_over_ranks(by_rank),
        axes_without_closed_form=unpredicted_axes,
        traffic_mismatches=traffic_mismatches_of(answers, by_rank, unpredicted_axes),
    )


def traffic_mismatches_of(
    answers: Sequence[RankResult], by_rank: Sequence[TrafficTable], unpredicted_axes: Collection[str] = ()
) -> list[str]:
    """A line for each flow of a rank that is not what it should be. without: axes that are not looked at."""
    mismatches = []
    for rank, (answer, expected) in enumerate(zip(answers, by_rank, strict=True)):
        flow_of = {(f.axis, f.collective): (f.calls, f.sent_bytes) for f in answer.flows}
        for axis, collective in sorted(flow_of.keys() | expected.keys()):
            counted_flow, expected_flow = (
                flows.get((axis, collective), (0, 0)) for flows in (flow_of, expected)
            )
            if counted_flow != expected_flow and axis not in unpredicted_axes:
                mismatches.append(
                    f"rank {rank}, {collective} over {axis}: {counted_flow[1]:,} bytes in {counted_flow[0]} calls, "
                    f"expected {expected_flow[1]:,} in {expected_flow[0]}"
                )
    return mismatches


def _max_over_ranks(by_rank: Sequence[TrafficTable]) -> TrafficTable:
    max_table: TrafficTable = {}
    for flows in by_rank:
        for key, flow in flows.items():
            max_table[key] = max(flow, max_table.get(key, flow), key=lambda item: item[1])
    return max_table


def gradient_differences(
    expected: Mapping[str, Tensor], answers: Sequence[RankResult], limits: Limits = LIMITS["fp64"]
) -> list[Difference]:
    """‖g − r‖ / max(‖r‖, floor·‖all r‖) of each gradient, the worst first.

    A block that several ranks hold counts with the worst of them; an element that no rank holds counts as NaN.
    """
    expected_norm = ReferenceStep(0.0, expected).grad_norm
    differences = []
    for name, gradient in expected.items():
        norm = float(gradient.norm())
        distance = _distance(gradient, [answer.blocks.get(name, []) for answer in answers])
        error = _relative(distance, max(norm, limits.relative_floor * expected_norm))
        differences.append(Difference(name, error, norm, tuple(gradient.shape), limits.bound))
    return _worst_first(differences)


def update_differences(config: Config, answers: Sequence[RankResult], limits: Limits) -> list[Difference]:
    """‖w − r‖ / max(‖u‖, floor·‖all u‖) of each trained weight after the step, the worst first, where r is the weight
    that the plain optimizer makes of the layout's gradients, and u = r less the weight before.

    What a weight of the layout's precision can't hold of a smaller update is no error: four units in its last place.
    """
    weights = plain_weights(config)
    gradients = {
        name: _assembled(weight, [answer.blocks.get(name, []) for answer in answers])
        for name, weight in weights.items()
    }
    updated = plain_step(config, build_model(config), weights, gradients)
    updates = {name: updated[name] - weight for name, weight in weights.items()}
    expected_norm = ReferenceStep(0.0, updates).grad_norm
    last_place = torch.finfo(PRECISIONS[config.train.precision].param_dtype).eps / limits.bound
    differences = []
    for name, update in updates.items():
        norm = float(update.norm())
        distance = _distance(updated[name], [answer.weights.get(name, []) for answer in answers])
        size = max(norm, limits.relative_floor * expected_norm, 4 * last_place * float(updated[name].norm()))
        differences.append(
            Difference(
                f"update of {name}", _relative(distance, size), norm, tuple(update.shape), limits.bound
            )
        )
    return _worst_first(differences)


def _assembled(like: Tensor, by_rank: Iterable[BlocksOfOne]) -> Tensor:
    """A whole tensor from the blocks that ranks hold of it; NaN where none has any."""
    assembled = torch.full_like(like, float("nan"))
    for box, block in (pair for blocks in by_rank for pair in blocks):
        assembled[_slices(box)] = torch.from_numpy(block).to(assembled)
    return assembled


def _distance(expected: Tensor, by_rank: Iterable[BlocksOfOne]) -> float:
    """‖all blocks − expected‖, the worst of those that several ranks hold; NaN if some element is on no rank."""
    squares: dict[Chunk, float] = {}
    for box, block in (pair for blocks in by_rank for pair in blocks):
        difference = torch.from_numpy(block) - expected[_slices(box)]
        squares[box] = _larger(squares.get(box, 0.0), float(difference.square().sum()))
    n_elements = sum(torch.Size(sizes).numel() for _, sizes in squares)
    return sum(squares.values()) ** 0.5 if n_elements == expected.numel() else float("nan")


def _worst_first(differences: Iterable[Difference]) -> list[Difference]:
    return sorted(
        differences, key=lambda difference: (difference.error == difference.error, -difference.error)
    )


def _worst(name: str, values: Sequence[float], expected: float, limits: Limits) -> Difference:
    error = 0.0
    for value in values:
        error = _larger(error, _relative(abs(value - expected), abs(expected)))
    return Difference(name, error, expected, (), limits.bound)


def _relative(error: float, size: float) -> float:
    """error / size. Where a batch predicts nothing and size is zero: 0 without an error, else infinity."""
    return error / size if size else error and float("inf")


def _larger(error: float, other_error: float) -> float:
    """The larger of two numbers; NaN if either is."""
    return error + other_error if error != error or other_error != other_error else max(error, other_error)


def _slices(box: Chunk) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def _busiest_rank(answers: Sequence[RankResult]) -> list[CollectiveTraffic]:
    """Traffic of the rank that sends most, for each axis and collective."""
    max_traffic: dict[tuple[str, str], CollectiveTraffic] = {}
    for answer in answers:
        for flow in answer.flows:
            key = flow.axis, flow.collective
            if key not in max_traffic or flow.sent_bytes > max_traffic[key].sent_bytes:
                max_traffic[key] = flow
    return [max_traffic[key] for key in sorted(max_traffic)]


Outcome = Literal["agrees", "refused", "DIFFERENT", "FAILED"]


@dataclass(frozen=True)
class Case:
    """A preset under a layout, and what came of it. text: why it was refused, or what differs."""

    preset: str
    layout: str
    outcome: Outcome
    text: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """Whether the layout is another computation than one process, or failed."""
        return self.outcome in ("DIFFERENT", "FAILED")


def walk(
    cases: Iterable[tuple[str, str]], overrides: Sequence[str] = (), documents: Documents = "mixed"
) -> Iterator[Case]:
    """Verify presets under layouts, by their names; a layout that can't be is refused, as a config's would be."""
    with RankTeam() as team:
        for preset, layout in cases:
            start = time.monotonic()
            outcome, text = _case(preset, layout, overrides, documents, team)
            yield Case(preset, layout, outcome, text, time.monotonic() - start)
            gc.collect()  # models are in cycles with their hooks


def _case(
    preset: str, layout: str, overrides: Sequence[str], documents: Documents, team: RankTeam
) -> tuple[Outcome, str]:
    axes = [f"parallel.{key}={value}" for key, value in {**ONE, **LAYOUTS[layout]}.items()]
    try:
        config = load_config(preset, [*axes, *overrides])
        if config.parallel.engine == "native":
            return _outcome(verify(config, documents, team))
        return _outcome(verify(config, documents))  # other engines keep global state: processes of their own
    except UsageError as error:
        return "refused", str(error)
    except MegatfmError as error:
        return "FAILED", str(error)


def _outcome(comparison: GradientComparison) -> tuple[Outcome, str]:
    if wrong := comparison.wrong:
        worst = wrong[0]
        return "DIFFERENT", f"{worst.name} by {worst.error:.1e} (and {len(wrong) - 1} more)"
    if misses := comparison.traffic_mismatches:
        return "DIFFERENT", f"{misses[0]} (and {len(misses) - 1} more)"
    return "agrees", f"{max(difference.error for difference in comparison.gradients):.1e}"
