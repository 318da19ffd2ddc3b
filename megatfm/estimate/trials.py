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
from pydantic import ValidationError
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatfm.config import Config, ParallelConfig
from megatfm.data.loader import without_documents
from megatfm.describe import describe
from megatfm.estimate.clock import Clock, Measurement, OperatorTimer, launches_kernel, measure_in_turns
from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.kernels import BACKWARD_MATMULS
from megatfm.estimate.operators import Operator, OperatorRecorder
from megatfm.estimate.roofline import name_matmuls
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory
from megatfm.verify.shrink import draw_batch, objective_for

MAX_FLOPS: Mapping[str, float] = {"cpu": 4e10, "cuda": 1e14}
"""FLOPs of the largest trial step, which takes about half a second."""
MAX_PARAMETERS: Mapping[str, float] = {"cpu": 1e8, "cuda": 3e8}
"""Parameters of the largest trial: all trials are in memory at once."""
MAX_VOCABULARY: Mapping[str, int] = {"cpu": 4096, "cuda": 32768}
"""Tokens of the largest vocabulary of a trial."""
WIDTH_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Divisors of a model's width in trials; the largest `N_WIDTHS` widths that are small enough take part."""
N_WIDTHS = 4
ROWS: Mapping[str, Sequence[tuple[int, int]]] = {
    "cpu": ((1, 128), (2, 192), (1, 320), (2, 512)),
    "cuda": ((1, 1024), (2, 1024), (1, 4096)),
}
"""Rows and tokens of a row of trials."""
FUSED_ATTENTION = "_scaled_dot_product_"
"""Prefix of torch's kernels of fused attention."""


def list_trials(config: Config, kind: str, precision: str) -> list[Config]:
    """Return small copies of a config, on one rank: few layers, several widths, and several numbers of tokens.

    kind: of the device, as torch names it.
    """
    device = {"train.device": kind, "train.precision": precision}
    trials: list[Config] = []
    widths = set[int]()
    for divisor, (rows, length) in itertools.product(WIDTH_DIVISORS, ROWS[kind]):
        trial = _make_trial(config, divisor, rows, length, MAX_VOCABULARY[kind], device)
        if trial is None or trial in trials or (len(widths) == N_WIDTHS and divisor not in widths):
            continue
        description = describe(trial)
        flops = 6 * description.active * rows * description.tokens_per_row
        if flops <= MAX_FLOPS[kind] and description.parameters <= MAX_PARAMETERS[kind]:
            widths.add(divisor)
            trials.append(trial)
    return trials


def _make_trial(
    config: Config, divisor: int, rows: int, length: int, max_vocabulary: int, device: Mapping[str, str]
) -> Config | None:
    """Return a small copy of a config; None where its widths can't be divided so. device: keys of the machine."""
    model, changes = config.model, dict[str, Any](device)
    if divisor > 1:
        sizes = {"d_model": model.d_model, "ffn.d_ff": model.ffn.d_ff, "attention.n_heads": model.attention.n_heads}
        if any(size % divisor for size in sizes.values()):
            return None
        changes |= {f"model.{key}": size // divisor for key, size in sizes.items()}
        if model.attention.kv_heads != model.attention.n_heads:
            changes["model.attention.n_kv_heads"] = max(1, model.attention.kv_heads // divisor)
    first_depths = (model.layer_types.index(kind) + 1 for kind in model.layer_type)
    layers = max(2, 1 + (model.distinct_layers or 0), *first_depths)
    changes["parallel"] = ParallelConfig(zero=0, dp_shard=1)
    changes |= {
        "train.micro_batch": rows,
        "train.global_batch": rows,
        "train.recompute": "none",
        "train.compile": False,
        "train.cuda_graphs": False,
    }
    changes["model.n_layers"] = min(model.n_layers, layers)
    if model.n_encoder_layers:
        changes["model.n_encoder_layers"] = min(model.n_encoder_layers, layers)
    if model.vocab_size:
        changes["model.vocab_size"] = min(model.vocab_size, max_vocabulary)
    if config.reads_text:
        changes["data.sequence_length"] = min(length, config.data.sequence_length)
    try:
        return config.with_changes(changes)
    except ValidationError:
        return None


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


def measure_trials(
    configs: Sequence[Config],
    clock: Clock,
    held_out: Sequence[Config] = (),
    others: Sequence[Measurement] = (),
) -> tuple[TrialTimes, list[float]]:
    """Measure steps of configs and each of their operators, in turns. held_out: configs of steps alone.

    others: measurements that take turns with these, and whose seconds are returned, too.
    """
    keep_freed_memory(clock.device)
    measurements: list[Measurement] = []
    recorded: list[tuple[list[Call], list[Call]]] = []
    with _single_process_group(clock.device):
        for index, config in enumerate((*configs, *held_out)):
            passes, update = _make_step(config, clock.device)
            step = partial(_run_both, passes, update)
            step()  # the first steps allocate
            if index < len(configs):
                recorded.append((record_calls(passes), record_calls(update)))
            measurements.append(partial(_time_step, clock, step, with_operators=index < len(configs)))
        seconds = measure_in_turns([*measurements, *others])
    times = TrialTimes()
    by_call: dict[Call, list[float]] = defaultdict(list)
    for config, (passes_calls, update_calls), measured_step in zip(configs, recorded, seconds, strict=False):
        step_seconds, *operator_seconds = measured_step
        for call, measured in zip((*passes_calls, *update_calls), operator_seconds, strict=True):
            by_call[call].append(measured)
        times.trials.append(Trial(config, step_seconds, sum(operator_seconds[len(passes_calls) :])))
    times.operators += [(call.operator, float(np.mean(measured))) for call, measured in by_call.items()]
    times.held_out += [Trial(config, *step) for config, step in zip(held_out, seconds[len(configs) :], strict=False)]
    return times, list(itertools.chain(*seconds[len(measurements) :]))


def _make_step(config: Config, device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build an engine, and return functions that run its passes and its optimizer's update.

    At a learning rate of 0 weights stay, and so do the operators: gradients are clipped in each step or in none.
    """
    engine = build_engine(config, build_mesh(config.parallel, 1, device.type), device, config.train.precision)
    objective = objective_for(config)
    fields = without_documents(draw_batch(config, "one"))
    batch = {name: torch.from_numpy(values) for name, values in fields.items()}

    def run_passes() -> None:
        with torch.enable_grad():
            engine.forward_backward([batch], objective)

    return run_passes, partial(engine.step, 0.0, config.optimizer.max_grad_norm)


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


def _time_step(clock: Clock, step: Callable[[], object], with_operators: bool) -> list[float]:
    """Return the seconds of a step, and of the operators of another one."""
    seconds = [clock.time_call(step)]
    return [*seconds, *time_operators(clock, step)] if with_operators else seconds


def time_operators(clock: Clock, function: Callable[[], object]) -> list[float]:
    """Return the seconds of each operator that a function runs."""
    with OperatorTimer(clock) as timer:
        function()
    return timer.seconds


@dataclass(frozen=True)
class Call:
    """An operator and its signature: the bytes that it moves, and its arguments' shapes, layouts and flags."""

    signature: Hashable
    operator: Operator = field(compare=False)


def record_calls(function: Callable[[], object]) -> list[Call]:
    """Return the operators that a function runs and that `OperatorTimer` measures, in order."""
    recorder = _CallRecorder()
    with recorder.record():
        function()
    return recorder.calls


class _CallRecorder(OperatorRecorder):
    """Records operators with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not launches_kernel(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        operator = self.recording.operators[-1]
        signature = str(func), operator.moved_bytes, *map(_describe_argument, tree_leaves((args, kwargs)))
        if operator.name.startswith(FUSED_ATTENTION):
            operator = _count_attention(operator, args, kwargs)
        self.calls.append(Call(signature, operator))
        return output


def _count_attention(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operator:
    """Return torch's fused attention as an operator of that kind, with the FLOPs of visible pairs."""
    is_backward = operator.name.endswith("_backward")
    query, key = args[is_backward : is_backward + 2]  # after the output's gradient
    rows, heads, length, width = query.shape
    is_causal = any(value is True for value in (*args, *kwargs.values()))
    pairs = length * (length + 1) / 2 if is_causal else length * key.shape[2]
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
    operators, gradients, beyond, tensors, moved = [], [], [], [], []
    for trial in times.trials:
        sizes = _estimate_without_overheads(trial.config, device)
        operators.append(sizes.n_operators / trial.step)
        gradients.append(sizes.gradient_bytes / trial.step)
        beyond.append(1 - (sizes.passes + trial.update) / trial.step)
        tensors.append(len(describe(trial.config).shapes) / trial.update)
        moved.append(sizes.update_bytes / trial.update)
    if device.kind == "cuda":  # the host works beside the device: a step takes at least its time
        host, per_gradient = min(1 / share for share in operators), 0.0
    else:
        host, per_gradient = _fit_positive([operators, gradients], beyond)
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
