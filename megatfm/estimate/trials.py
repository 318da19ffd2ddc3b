"""Trial steps of small copies of a model, and each of their operators measured alone.

A step takes about as long as its operators, each measured alone with the step's shapes and layouts, and some
microseconds an operator for Python and autograd. The operators give tables by size; the steps' time beyond their
estimates gives that of the host, and of adding up gradients.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from megatfm.config import Config
from megatfm.data.loader import without_documents
from megatfm.describe import describe
from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.kernels import BACKWARD_MATMULS
from megatfm.estimate.operators import COLLECTIVES, Operator, OperatorRecorder, describe_variant
from megatfm.estimate.roofline import name_matmuls
from megatfm.ops.kernel_free import KERNEL_FREE
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory
from megatfm.verify.shrink import draw_batch, objective_for

if TYPE_CHECKING:
    from megatfm.estimate.calibrate import Clock

FUSED_ATTENTION = "_scaled_dot_product_"
"""Prefix of torch's kernels of fused attention."""
OF_UPDATES = ("_foreach_", "_fused_")
"""Prefixes of torch's kernels of lists of tensors."""


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


def measure_trials(configs: Sequence[Config], clock: "Clock", held_out: Sequence[Config] = ()) -> TrialTimes:
    """Measure steps of configs, and each operator that they run, in turns. held_out: configs of steps alone."""
    keep_freed_memory(clock.device)
    calls: dict[Hashable, _Call] = {}
    steps: list[Callable[[], object]] = []
    signatures_of_updates: list[list[Hashable]] = []
    with _single_process_group(clock.device):
        for index, config in enumerate((*configs, *held_out)):
            passes, update = _make_step(config, clock.device)
            steps.append(partial(_run_both, passes, update))
            for _ in range(2):  # the first steps allocate
                steps[-1]()
            if index >= len(configs):
                continue
            with CallCollector(calls).record():
                passes()
            collector = CallCollector(calls)
            with collector.record():
                update()
            signatures_of_updates.append(collector.signatures)
        with torch.no_grad():
            seconds = clock.measure_fastest([*steps, *(call.run for call in calls.values())])
    seconds_by_call = dict(zip(calls, seconds[len(steps) :], strict=True))
    updates = [sum(seconds_by_call[signature] for signature in update) for update in signatures_of_updates]
    operators = [(call.operator, seconds_by_call[key]) for key, call in calls.items()]
    trials = [Trial(*measured) for measured in zip(configs, seconds, updates, strict=False)]
    held_out_seconds = seconds[len(configs) : len(steps)]
    return TrialTimes(operators, trials, list(map(Trial, held_out, held_out_seconds)))


def _make_step(config: Config, device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """Build an engine, and return functions that run its passes and its optimizer's update."""
    engine = build_engine(config, build_mesh(config.parallel, 1, device.type), device, config.train.precision)
    objective = objective_for(config)
    fields = without_documents(draw_batch(config, "one"))
    batch = {name: torch.from_numpy(values) for name, values in fields.items()}

    def run_passes() -> None:
        with torch.enable_grad():
            engine.forward_backward([batch], objective)

    return run_passes, partial(engine.step, config.optimizer.lr, config.optimizer.max_grad_norm)


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


@dataclass
class _Call:
    """An operator with copies of its arguments."""

    function: Any
    args: Any
    kwargs: Any
    operator: Operator

    def run(self) -> object:
        return self.function(*self.args, **self.kwargs)


class CallCollector(OperatorRecorder):
    """Records operators, and the first call of each with its shapes, layouts and flags.

    calls: signature → call, to which new ones are added; signatures: of all calls in order.
    """

    def __init__(self, calls: dict[Hashable, _Call]) -> None:
        super().__init__()
        self._calls = calls
        self.signatures: list[Hashable] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        leaves = tree_leaves((args, kwargs))
        variant = describe_variant(name, [x for x in leaves if isinstance(x, Tensor)], args, kwargs)
        signature = str(func), variant, *map(_describe_argument, leaves)
        if namespace in ("prim", *COLLECTIVES) or name in KERNEL_FREE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.signatures.append(signature)
        if signature in self._calls:
            return super().__torch_dispatch__(func, types, args, kwargs)
        copies: tuple[Any, Any] = args, kwargs
        if not name.startswith(OF_UPDATES):  # others may write into tensors that serve as indices
            copies = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), copies)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        operator = self.recording.operators[-1]
        if name.startswith(FUSED_ATTENTION):
            operator = _count_attention(operator, args, kwargs)
        self._calls[signature] = _Call(func, copies[0], copies[1], operator)
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
