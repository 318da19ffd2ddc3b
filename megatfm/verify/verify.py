"""Comparison of one training step under a layout with the same step on one process: loss, gradients and updates."""

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
from megatfm.parallel.layout import Region
from megatfm.registry import import_plugins
from megatfm.train.build import build_model
from megatfm.verify.expected import compute_expected_traffic, explain_unpredicted_axes
from megatfm.verify.layouts import LAYOUTS, SINGLE_RANK, Documents
from megatfm.verify.rank_processes import RankPool, RankResult
from megatfm.verify.reference import ReferenceStep, compute_plain_weights, take_plain_step, take_reference_step
from megatfm.verify.shrink import draw_batch, shrink
from megatfm.verify.traffic import CollectiveTraffic, TrafficTable

ParameterBlocks = Sequence[tuple[Region, NDArray[np.floating[Any]]]]
"""Blocks of one parameter on a rank, with their offsets and sizes in the full tensor."""


@dataclass(frozen=True)
class Limits:
    """Error limits of a comparison.

    bound: largest relative error that rounding can explain, with a margin. relative_floor: a gradient smaller than
    this share of the global gradient norm is measured against that share, since some are zero in theory.
    """

    bound: float
    relative_floor: float


LIMITS = {"fp64": Limits(bound=1e-9, relative_floor=1e-6), "fp32": Limits(bound=1e-5, relative_floor=1e-3)}
"""Precision of the layout's engine → limits."""


@dataclass(frozen=True)
class Difference:
    """Relative error of one value or tensor of the layout against the single process; NaN counts as wrong."""

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
    """Differences of a step, the worst first, and its traffic."""

    config: Config
    shrunk: list[str]
    gradients: list[Difference]
    updates: list[Difference]
    """Differences in the optimizer's update of each weight, given the layout's gradients."""
    loss: Difference
    grad_norm: Difference
    traffic: list[CollectiveTraffic]
    expected_traffic: TrafficTable
    """Axis and collective → calls and bytes by closed forms, on the rank that sends most."""
    axes_without_closed_form: Mapping[str, str]
    """Axis → why it has no closed form."""
    traffic_mismatches: Sequence[str] = ()
    """A message for each collective of a rank whose traffic is not as expected."""

    @property
    def bound(self) -> float:
        """Largest error that is not wrong."""
        return self.loss.bound

    @property
    def wrong(self) -> list[Difference]:
        """Loss, gradient norm, gradients and updates that differ by more than rounding."""
        differences = (self.loss, self.grad_norm, *self.gradients, *self.updates)
        return [difference for difference in differences if difference.is_wrong]


def verify(config: Config, documents: Documents = "mixed", pool: RankPool | None = None) -> GradientComparison:
    """Take one step of the shrunk config on one process and under its layout, both on the CPU, and compare them.

    Computes in float64, or float32 under an engine without float64. documents: kind of documents in each row. pool:
    rank processes to use; None starts new ones for this call. Raises UsageError for an impossible layout, and
    MegatfmError that names the rank if one fails or hangs.
    """
    import_plugins(config.plugins)
    small, shrunk = shrink(config)
    batch = draw_batch(small, documents)
    reference = take_reference_step(small, batch)
    if pool:
        results = pool.step(small, batch)
    else:
        with RankPool() as pool:
            results = pool.step(small, batch)
    limits = LIMITS[small.train.precision]
    unpredicted_axes = explain_unpredicted_axes(small)
    expected_by_rank = [
        {key: flow for key, flow in flows.items() if key[0] not in unpredicted_axes}
        for flows in compute_expected_traffic(small, batch)
    ]
    return GradientComparison(
        config=small,
        shrunk=shrunk,
        gradients=compute_gradient_differences(reference.gradients, results, limits),
        updates=compute_update_differences(small, results, limits),
        loss=_find_worst_difference("loss", [result.loss for result in results], reference.loss, limits),
        grad_norm=_find_worst_difference(
            "gradient norm", [result.grad_norm for result in results], reference.grad_norm, limits
        ),
        traffic=_find_max_traffic(results),
        expected_traffic=_find_max_expected(expected_by_rank),
        axes_without_closed_form=unpredicted_axes,
        traffic_mismatches=find_traffic_mismatches(results, expected_by_rank, unpredicted_axes),
    )


def find_traffic_mismatches(
    results: Sequence[RankResult], expected_by_rank: Sequence[TrafficTable], unpredicted_axes: Collection[str] = ()
) -> list[str]:
    """Return a message for each collective whose calls or bytes on a rank differ from the expected ones."""
    mismatches = []
    for rank, (result, expected) in enumerate(zip(results, expected_by_rank, strict=True)):
        counted = {(flow.axis, flow.collective): (flow.calls, flow.sent_bytes) for flow in result.traffic}
        for axis, collective in sorted(counted.keys() | expected.keys()):
            calls, n_bytes = counted.get((axis, collective), (0, 0))
            expected_calls, expected_bytes = expected.get((axis, collective), (0, 0))
            if (calls, n_bytes) != (expected_calls, expected_bytes) and axis not in unpredicted_axes:
                mismatches.append(
                    f"rank {rank}, {collective} over {axis}: {n_bytes:,} bytes in {calls} calls, "
                    f"expected {expected_bytes:,} in {expected_calls}"
                )
    return mismatches


def _find_max_expected(by_rank: Sequence[TrafficTable]) -> TrafficTable:
    max_table: TrafficTable = {}
    for flows in by_rank:
        for key, flow in flows.items():
            max_table[key] = max(flow, max_table.get(key, flow), key=lambda item: item[1])
    return max_table


def compute_gradient_differences(
    expected: Mapping[str, Tensor], results: Sequence[RankResult], limits: Limits = LIMITS["fp64"]
) -> list[Difference]:
    """Compute ‖g − r‖ / max(‖r‖, floor·‖all r‖) of each gradient g against its reference r, the worst first.

    Of a block that several ranks hold, the worst copy counts. An element that no rank holds counts as NaN.
    """
    expected_norm = ReferenceStep(0.0, expected).grad_norm
    differences = []
    for name, gradient in expected.items():
        norm = float(gradient.norm())
        distance = _compute_distance(gradient, [result.gradients.get(name, []) for result in results])
        error = _compute_relative_error(distance, max(norm, limits.relative_floor * expected_norm))
        differences.append(Difference(name, error, norm, tuple(gradient.shape), limits.bound))
    return _sort_worst_first(differences)


def compute_update_differences(config: Config, results: Sequence[RankResult], limits: Limits) -> list[Difference]:
    """Compute ‖w − r‖ / max(‖u‖, floor·‖all u‖) of each trained weight w after the step, the worst first.

    r is the weight that the plain optimizer computes from the layout's gradients, and u its change. An error below
    four units in the last place of the weight (in the layout's precision) passes.
    """
    weights = compute_plain_weights(config)
    gradients = {
        name: _assemble(weight, [result.gradients.get(name, []) for result in results])
        for name, weight in weights.items()
    }
    updated = take_plain_step(config, build_model(config), weights, gradients)
    updates = {name: updated[name] - weight for name, weight in weights.items()}
    expected_norm = ReferenceStep(0.0, updates).grad_norm
    spacing = torch.finfo(PRECISIONS[config.train.precision].param_dtype).eps / limits.bound
    differences = []
    for name, update in updates.items():
        norm = float(update.norm())
        distance = _compute_distance(updated[name], [result.weights.get(name, []) for result in results])
        size = max(norm, limits.relative_floor * expected_norm, 4 * spacing * float(updated[name].norm()))
        error = _compute_relative_error(distance, size)
        differences.append(Difference(f"update of {name}", error, norm, tuple(update.shape), limits.bound))
    return _sort_worst_first(differences)


def _assemble(like: Tensor, by_rank: Iterable[ParameterBlocks]) -> Tensor:
    """Assemble a full tensor from the blocks on all ranks; NaN where no rank has a block."""
    assembled = torch.full_like(like, float("nan"))
    for region, block in (pair for blocks in by_rank for pair in blocks):
        assembled[_make_slices(region)] = torch.from_numpy(block).to(assembled)
    return assembled


def _compute_distance(expected: Tensor, by_rank: Iterable[ParameterBlocks]) -> float:
    """Compute ‖all blocks − expected‖ with the worst copy of each block; NaN if an element is on no rank."""
    squared_distances: dict[Region, float] = {}
    for region, block in (pair for blocks in by_rank for pair in blocks):
        difference = torch.from_numpy(block) - expected[_make_slices(region)]
        squared = float(difference.square().sum())
        squared_distances[region] = _max_or_nan(squared_distances.get(region, 0.0), squared)
    n_elements = sum(torch.Size(sizes).numel() for _, sizes in squared_distances)
    return sum(squared_distances.values()) ** 0.5 if n_elements == expected.numel() else float("nan")


def _sort_worst_first(differences: Iterable[Difference]) -> list[Difference]:
    return sorted(differences, key=lambda item: (item.error == item.error, -item.error))  # NaN first


def _find_worst_difference(name: str, values: Sequence[float], expected: float, limits: Limits) -> Difference:
    error = 0.0
    for value in values:
        error = _max_or_nan(error, _compute_relative_error(abs(value - expected), abs(expected)))
    return Difference(name, error, expected, (), limits.bound)


def _compute_relative_error(error: float, size: float) -> float:
    """Return error / size; if size is zero, as for a batch without targets: 0 without an error, else infinity."""
    return error / size if size else error and float("inf")


def _max_or_nan(error: float, other_error: float) -> float:
    """Return the larger error, or NaN if either is NaN."""
    return error + other_error if error != error or other_error != other_error else max(error, other_error)


def _make_slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*region, strict=True))


def _find_max_traffic(results: Sequence[RankResult]) -> list[CollectiveTraffic]:
    """Return, for each axis and collective, the traffic of the rank that sends most."""
    max_traffic: dict[tuple[str, str], CollectiveTraffic] = {}
    for result in results:
        for flow in result.traffic:
            key = flow.axis, flow.collective
            if key not in max_traffic or flow.sent_bytes > max_traffic[key].sent_bytes:
                max_traffic[key] = flow
    return [max_traffic[key] for key in sorted(max_traffic)]


Outcome = Literal["agrees", "refused", "DIFFERENT", "FAILED"]


@dataclass(frozen=True)
class PresetResult:
    """Outcome of verifying a preset under a layout. text: the largest error, why it was refused, or what differs."""

    preset: str
    layout: str
    outcome: Outcome
    text: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """Whether the layout computes something else than one process, or failed."""
        return self.outcome in ("DIFFERENT", "FAILED")


def verify_presets(
    cases: Iterable[tuple[str, str]], overrides: Sequence[str] = (), documents: Documents = "mixed"
) -> Iterator[PresetResult]:
    """Verify each (preset, layout) by name; an impossible layout is refused, as in training."""
    with RankPool() as pool:
        for preset, layout in cases:
            start = time.monotonic()
            outcome, text = _verify_preset(preset, layout, overrides, documents, pool)
            yield PresetResult(preset, layout, outcome, text, time.monotonic() - start)
            gc.collect()  # models form reference cycles with their hooks


def _verify_preset(
    preset: str, layout: str, overrides: Sequence[str], documents: Documents, pool: RankPool
) -> tuple[Outcome, str]:
    layout_overrides = [f"parallel.{key}={value}" for key, value in {**SINGLE_RANK, **LAYOUTS[layout]}.items()]
    try:
        config = load_config(preset, [*layout_overrides, *overrides])
        if config.parallel.engine == "native":
            return _describe_outcome(verify(config, documents, pool))
        # Other engines keep global state and need new processes.
        return _describe_outcome(verify(config, documents))
    except UsageError as error:
        return "refused", str(error)
    except MegatfmError as error:
        return "FAILED", str(error)


def _describe_outcome(comparison: GradientComparison) -> tuple[Outcome, str]:
    if wrong := comparison.wrong:
        worst = wrong[0]
        return "DIFFERENT", f"{worst.name} by {worst.error:.1e} (and {len(wrong) - 1} more)"
    if mismatches := comparison.traffic_mismatches:
        return "DIFFERENT", f"{mismatches[0]} (and {len(mismatches) - 1} more)"
    return "agrees", f"{max(difference.error for difference in comparison.gradients):.1e}"
