"""Trial steps of small copies of a model, and each operator measured within them.

A step takes about as long as its operators and some microseconds an operator for Python and autograd. The operators
give tables by size; the steps' time beyond their estimates gives that of the host, and of adding up gradients.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatfm.config import Config
from megatfm.data.loader import without_documents
from megatfm.describe import describe
from megatfm.errors import MegatfmError
from megatfm.estimate.clock import Clock, Measurement, OperatorTimer, launches_kernel, measure_in_turns
from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.kernels import BACKWARD_MATMULS
from megatfm.estimate.operators import Operator, OperatorRecorder
from megatfm.estimate.roofline import interpolate_rate, name_matmuls
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.process_state import keep_freed_memory
from megatfm.verify.shrink import draw_batch, objective_for

FUSED_ATTENTION = "_scaled_dot_product_"
"""Prefix of torch's kernels of fused attention."""
UNREACHED_NORM = 1e9
"""Norm of gradients to which none is clipped."""
MIN_SQUARE = 0.25
"""Square of the distance, half a doubling of one size, below which matmuls count as equally near."""


@dataclass
class Trial:
    """A small config and the seconds of its step, and of the optimizer's update in it (the sum of its operators)."""

    config: Config
    step: float
    update: float = 0.0


@dataclass
class TrialTimes:
    """Measured operators of trials, (operator, seconds) each; trials; and those whose operators were not measured."""

    operators: list[tuple[Operator, float]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    held_out: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class OperatorCall:
    """An operator and its signature: its variant, the bytes that it moves, its arguments' shapes, layouts and flags."""

    signature: Hashable
    operator: Operator = field(compare=False)


def measure_trials(
    configs: Sequence[Config],
    clock: Clock,
    held_out: Sequence[Config] = (),
    further_measurements: Sequence[Measurement] = (),
) -> tuple[TrialTimes, list[float]]:
    """Measure steps of configs and each of their operators, in turns. held_out: configs of steps alone.

    further_measurements: of one part each; they take turns with these, and their seconds are returned, too.
    """
    keep_freed_memory(clock.device)
    measurements: list[Measurement] = []
    calls: list[tuple[list[OperatorCall], list[OperatorCall]]] = []
    with _single_process_group(clock.device):
        for index, config in enumerate((*configs, *held_out)):
            passes, update = _make_step(config, clock.device)
            step = partial(_run_both, passes, update)
            for _ in range(2):  # the first steps allocate
                step()
            if index < len(configs):
                calls.append((record_calls(passes), record_calls(update)))
                measurements.append(partial(time_step_and_operators, clock, step, sum(map(len, calls[-1]))))
            else:
                measurements.append(partial(time_step, clock, step))
        seconds = measure_in_turns([*measurements, *further_measurements])
    times = _collect_times(configs, calls, seconds)
    times.held_out += [Trial(config, *step) for config, step in zip(held_out, seconds[len(configs) :], strict=False)]
    return times, list(itertools.chain(*seconds[len(measurements) :]))


def _collect_times(
    configs: Sequence[Config],
    calls: Sequence[tuple[list[OperatorCall], list[OperatorCall]]],
    seconds: Sequence[Sequence[float]],
) -> TrialTimes:
    """Return trials' times. calls: of each one's passes and update; seconds: of its step and of these calls.

    Equal calls count as one operator, by their mean.
    """
    times = TrialTimes()
    seconds_by_call: dict[OperatorCall, list[float]] = defaultdict(list)
    for config, (passes_calls, update_calls), (step, *operators) in zip(configs, calls, seconds, strict=False):
        for call, operator_seconds in zip((*passes_calls, *update_calls), operators, strict=True):
            seconds_by_call[call].append(operator_seconds)
        times.trials.append(Trial(config, step, sum(operators[len(passes_calls) :])))
    times.operators += [(call.operator, float(np.mean(measured))) for call, measured in seconds_by_call.items()]
    return times


def _make_step(config: Config, device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build an engine, and return functions that run its passes and its optimizer's update.

    At a learning rate of 0 weights stay, and no gradient is clipped: all steps run the same operators.
    """
    engine = build_engine(config, build_mesh(config.parallel, 1, device.type), device, config.train.precision)
    objective = objective_for(config)
    fields = without_documents(draw_batch(config, "one"))
    batch = {name: torch.from_numpy(values) for name, values in fields.items()}
    update = partial(engine.step, 0.0, config.optimizer.max_grad_norm and UNREACHED_NORM)
    return partial(engine.forward_backward, [batch], objective), update


def _run_both(passes: Callable[[], object], update: Callable[[], object]) -> None:
    passes()
    update()


@contextmanager
def _single_process_group(device: torch.device) -> Iterator[None]:
    """Run the body in a process group of one rank."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def time_step(clock: Clock, step: Callable[[], object]) -> list[float]:
    """Return the seconds of a step that follows an equal one, as in a run: caches hold what that one left."""
    step()
    return [clock.time_call(step)]


def time_step_and_operators(clock: Clock, step: Callable[[], object], n_operators: int) -> list[float]:
    """Return the seconds of a step, and of each operator of the next. Raises MegatfmError if that one differs."""
    (step_seconds,), operator_seconds = time_step(clock, step), time_operators(clock, step)
    if len(operator_seconds) != n_operators:
        raise MegatfmError(
            f"--calibrate: two equal steps ran {n_operators} and {len(operator_seconds)} operators, so they can't be "
            "measured by turns: calibrate with a preset of another family"
        )
    return [step_seconds, *operator_seconds]


def time_operators(clock: Clock, function: Callable[[], object]) -> list[float]:
    """Return the seconds of each operator that a function runs."""
    with OperatorTimer(clock) as timer:
        function()
    return timer.seconds


def record_calls(function: Callable[[], object]) -> list[OperatorCall]:
    """Return the operators that a function runs and that `OperatorTimer` measures, in order."""
    recorder = _CallRecorder()
    with recorder.record():
        function()
    return recorder.calls


class _CallRecorder(OperatorRecorder):
    """Records operators with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not launches_kernel(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        operator = self.recording.operators[-1]
        signature = (
            str(func),
            operator.variant,
            operator.moved_bytes,
            *map(_describe_argument, tree_leaves((args, kwargs))),
        )
        if operator.name.startswith(FUSED_ATTENTION):
            names = (argument.name for argument in func._schema.arguments)
            operator = _count_attention(operator, {**dict(zip(names, args, strict=False)), **kwargs})
        self.calls.append(OperatorCall(signature, operator))
        return output


def _count_attention(operator: Operator, arguments: Mapping[str, Any]) -> Operator:
    """Return torch's fused attention as an operator of that kind, with the FLOPs of visible pairs.

    arguments: by name, since kernels have other flags beside `is_causal`.
    """
    query, key = arguments["query"], arguments["key"]
    rows, heads, length, width = query.shape
    pairs = length * (length + 1) / 2 if arguments.get("is_causal") else length * key.shape[2]
    is_backward = operator.name.endswith("_backward")
    flops = 2 * 2 * rows * heads * pairs * width * (BACKWARD_MATMULS if is_backward else 1)
    return replace(operator, kind="attention", flops=flops, is_backward=is_backward)


def _describe_argument(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return value if isinstance(value, str | bool) else type(value).__name__


# ------------------------------------------------------------------------------------------------ tables


def tabulate_matmuls(times: TrialTimes) -> dict[str, list[list[float]]]:
    """Return the measured matmuls by precision, batch and layout: rows (m, n, k, seconds of one matmul)."""
    tables: dict[str, list[list[float]]] = {}
    for operator, seconds in times.operators:
        if operator.kind == "matmul" and operator.dims is not None:
            batch, m, n, k = operator.dims
            tables.setdefault(name_matmuls(operator), []).append([m, n, k, seconds / batch])
    return tables


def fit_to_steps(rows: Sequence[Sequence[float]], rows_of_steps: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return matmuls measured alone (m, n, k, seconds), each scaled as those of steps, the near ones most.

    Within a step, operands are nearer or farther than alone: on a CPU, gradients' matmuls are up to 30 % faster there.
    A share is a mean of logarithms, weighted by inverse squares of distances between log sizes (Shepard 1968).
    """
    if not rows_of_steps:
        return [list(row) for row in rows]
    steps = np.asarray(rows_of_steps, dtype=float)
    alone = [2 * m * n * k / interpolate_rate(rows, m, n, k) for m, n, k in steps[:, :3]]
    shares, sizes = np.log(steps[:, 3] / alone), np.log2(steps[:, :3])
    scaled = []
    for *shape, seconds in rows:
        weights = 1 / (((sizes - np.log2(shape)) ** 2).sum(axis=1) + MIN_SQUARE)
        scaled.append([*shape, seconds * float(np.exp(np.average(shares, weights=weights)))])
    return scaled


def tabulate_attention(times: TrialTimes) -> dict[str, list[list[float]]]:
    """Return the measured fused attention by pass: rows (FLOPs, seconds)."""
    tables: dict[str, list[list[float]]] = {}
    for operator, seconds in times.operators:
        if operator.kind == "attention":
            tables.setdefault("backward" if operator.is_backward else "forward", []).append([operator.flops, seconds])
    return tables


def tabulate_operators(times: TrialTimes) -> dict[str, list[list[float]]]:
    """Return the measured memory-bound operators by variant: rows (bytes, seconds)."""
    tables: dict[str, list[list[float]]] = {}
    for operator, seconds in times.operators:
        if operator.kind == "pointwise":
            tables.setdefault(operator.variant, []).append([max(1, operator.moved_bytes), seconds])
    return {variant: sorted(rows) for variant, rows in sorted(tables.items())}


@dataclass(frozen=True)
class Overheads:
    """Seconds of a step beside those of its kernels.

    host_seconds: of Python and autograd, an operator. gradient_seconds: a byte of gradients that a pass casts and adds
    up. update_seconds: of the optimizer's update, a tensor and a byte that it reads or writes.
    """

    host_seconds: float
    gradient_seconds: float
    update_seconds: tuple[float, float]


def fit_overheads(times: TrialTimes, device: Device) -> Overheads:
    """Fit the times that trials take beyond the estimates of a measured device, by least squares of shares."""
    operators, gradients, excess, tensors, moved = [], [], [], [], []
    for trial in times.trials:
        sizes = _estimate_without_overheads(trial.config, device)
        operators.append(sizes.n_operators / trial.step)
        gradients.append(sizes.gradient_bytes / trial.step)
        excess.append(1 - (sizes.passes + trial.update) / trial.step)
        tensors.append(len(describe(trial.config).shapes) / trial.update)
        moved.append(sizes.update_bytes / trial.update)
    if device.kind == "cuda":  # the host works beside the device: a step takes at least its time
        host, per_gradient = min(1 / share for share in operators), 0.0
    else:
        host, per_gradient = _fit_positive([operators, gradients], excess)
    per_tensor, per_byte = _fit_positive([tensors, moved], [1.0] * len(moved))
    return Overheads(host, per_gradient, (per_tensor, per_byte))


def _fit_positive(columns: Sequence[Sequence[float]], sums: Sequence[float]) -> list[float]:
    """Return factors of columns, none below 0, whose sum is the nearest to `sums` by least squares."""
    table, used = np.stack(columns, 1), np.ones(len(columns), dtype=bool)
    factors = np.zeros(len(columns))
    while used.any():
        factors[:] = 0.0
        factors[used] = np.linalg.lstsq(table[:, used], np.asarray(sums), rcond=None)[0]
        if (factors >= 0).all():
            break
        used[factors.argmin()] = False
    return [max(0.0, float(factor)) for factor in factors]


class _Sizes(NamedTuple):
    """Seconds of a trial's passes without overheads, and the sizes by which these are fitted."""

    passes: float
    n_operators: float
    gradient_bytes: float
    update_bytes: float


def _estimate_without_overheads(config: Config, device: Device) -> _Sizes:
    cluster = replace(load_cluster("cpu", 1), device=replace(device, host_seconds=0.0, update_seconds=None))
    slow = replace(device, host_seconds=1.0, update_seconds=(0.0, 0.0), gradient_seconds=1.0)
    with open_estimator(config, cluster) as opened:
        on_slow_device = opened.with_cluster(replace(cluster, device=slow))
        times = [estimator.estimate(estimator.base).time for estimator in (opened, on_slow_device)]
    passes, passes_of_host = (time.step - time.optimizer - time.checkpoint - time.data for time in times)
    update_bytes = times[0].optimizer * device.memory_bandwidth * device.memory_efficiency
    return _Sizes(passes, passes_of_host - passes, times[1].optimizer, update_bytes)
