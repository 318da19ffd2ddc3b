"""Searches all layouts that the rules of configs allow: scores them quickly, and estimates the best in full. Finds
changes that make a run fit, too, and the largest micro-batch of a run that fits.

Layouts are the combinations of axis sizes, ZeRO stages, schedules, micro-batches and recompute modes. The rules of
configs refuse a layout here too, with the same words.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, ParallelConfig, layout_checks
from megatfm.config.section import list_divisors
from megatfm.config.world_size import compute_axis_sizes
from megatfm.errors import UsageError
from megatfm.estimate.devices import GIB
from megatfm.estimate.estimator import Estimate, Estimator
from megatfm.estimate.quick import QuickScores, Score
from megatfm.estimate.traffic import make_axes
from megatfm.parallel.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR

MAX_ESTIMATES = 24
"""Largest number of layouts that are estimated in full."""
MAX_WITH_SAME_AXES = 3
"""Largest number of those with the same axis sizes."""
MAX_MEMORY_SHARE = 0.95
"""Share of the device's memory that a chosen layout may take: batches differ, and memory fragments."""
SAME_SPEED = 0.01
"""Share of a step's time below which two layouts count as equally fast: estimates err by more."""
SCHEDULES: Sequence[tuple[str, int | None]] = (
    ("1f1b", None),
    ("interleaved", 2),
    ("interleaved", 4),
    ("interleaved-zero-bubble", 2),
    ("zbv", None),
    ("dualpipev", None),
)
STAGES: Sequence[tuple[int, str]] = (
    (0, "unsharded"),
    (1, "unsharded"),
    (2, "sharded"),
    (3, "unsharded"),
    (3, "sharded"),
)
RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of micro-batches that are tried; a search tries those up to `MAX_SEARCHED_MICRO_BATCH`."""
MAX_SEARCHED_MICRO_BATCH = 32


@dataclass(frozen=True)
class LayoutCandidate:
    """A legal layout and its score."""

    config: Config
    score: Score

    @property
    def axes(self) -> tuple[int, ...]:
        """Axis sizes."""
        parallel = self.config.parallel
        return parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp_replicate, parallel.dp_shard


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. best: full estimates that fit, the chosen one first, then the fastest; tried, n_fit: number
    of layouts, and of those that fit by their score; refused: reason → layouts; smallest: legal layout with the least
    memory."""

    best: Sequence[Estimate]
    tried: int
    refused: Counter[str]
    n_fit: int
    seconds: float
    smallest: LayoutCandidate | None


def search(estimator: Estimator) -> SearchResult:
    """Score all layouts, and estimate the best in full."""
    start = time.monotonic()
    scores, refused = QuickScores(estimator), Counter[str]()
    fitting: list[LayoutCandidate] = []
    smallest: LayoutCandidate | None = None
    limit, tried = MAX_MEMORY_SHARE * estimator.cluster.device.memory_bytes, 0
    for config in iter_layouts(estimator, refused):
        train, parallel = config.train, config.parallel
        tried += 1
        microbatches = train.global_batch // (train.micro_batch * parallel.dp_shard * parallel.dp_replicate)
        candidate = LayoutCandidate(config, scores.score(config, microbatches))
        if candidate.score.n_bytes <= limit:
            fitting.append(candidate)
        if smallest is None or candidate.score.n_bytes < smallest.score.n_bytes:
            smallest = candidate
    tried += refused.total()
    estimates = [estimator.estimate(candidate.config) for candidate in select_candidates(fitting)]
    best = order_estimates([estimate for estimate in estimates if estimate.worst.total <= limit])
    return SearchResult(best, tried, refused, len(fitting), time.monotonic() - start, smallest)


def order_estimates(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Sort estimates by speed, the chosen one first: of those as fast as the fastest, within `SAME_SPEED`, the one with
    the least memory in whole GiB, and of equals the one on fewer axes."""
    by_speed = sorted(estimates, key=lambda estimate: estimate.time.step)
    fast = [e for e in by_speed if e.time.step <= by_speed[0].time.step * (1 + SAME_SPEED)]
    chosen = min(fast, key=_measure_size, default=None)
    return sorted(by_speed, key=lambda e: e is not chosen)


def _measure_size(estimate: Estimate) -> tuple[int, int]:
    """Return a layout's memory in whole GiB, and the number of axes with several ranks."""
    axes = make_axes(estimate.config.parallel).values()
    return round(estimate.worst.total / GIB), sum(axis.size > 1 for axis in axes)


def select_candidates(candidates: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the fastest by their scores, few of them with the same axis sizes."""
    selected: list[LayoutCandidate] = []
    axes_count: Counter[tuple[int, ...]] = Counter()
    for candidate in sorted(candidates, key=lambda c: (c.score.seconds, c.score.n_bytes)):
        if axes_count[candidate.axes] < MAX_WITH_SAME_AXES:
            axes_count[candidate.axes] += 1
            selected.append(candidate)
        if len(selected) == MAX_ESTIMATES:
            break
    return selected


def iter_layouts(estimator: Estimator, refused: Counter[str]) -> Iterator[Config]:
    """Yield all legal layouts of the estimator's model on its cluster; count the refused ones by reason."""
    base, gpus = estimator.base, estimator.cluster.gpus
    for parallel in _iter_parallel_sections(base, gpus, estimator.cluster.node.gpus, refused):
        data_ranks = parallel.dp_shard * parallel.dp_replicate
        if base.train.global_batch % data_ranks:
            refused[f"train.global_batch = {base.train.global_batch} does not divide over the data ranks"] += 1
            continue
        share = base.train.global_batch // data_ranks
        for recompute in RECOMPUTE:
            config = base.model_copy(
                update={"parallel": parallel, "train": base.train.model_copy(update={"recompute": recompute})}
            )
            if reason := find_refusal(config) or _find_pipeline_refusal(estimator, config):
                refused[reason] += 1
                continue
            for micro_batch in (size for size in MICRO_BATCHES if size <= MAX_SEARCHED_MICRO_BATCH):
                if share % micro_batch or (
                    share == micro_batch and parallel.grad_accumulation == "sharded" and parallel.zero == 3
                ):
                    continue  # one micro-batch accumulates nothing: the same as "unsharded"
                if parallel.pp == 1 or share // micro_batch >= parallel.pp:
                    train = config.train.model_copy(update={"micro_batch": micro_batch})
                    yield config.model_copy(update={"train": train})


def find_refusal(config: Config) -> str | None:
    """Return the reason why the rules of configs refuse a layout, in short; else None."""
    try:
        layout_checks.check_tensor_parallel(config)
        layout_checks.check_row_lengths(config)
        layout_checks.check_expert_parallel(config)
        layout_checks.check_context_parallel(config)
        layout_checks.check_soft_moe(config)
        layout_checks.check_pipeline(config)
    except ValueError as error:
        return _get_first_clause(str(error))
    return None


def _find_pipeline_refusal(estimator: Estimator, config: Config) -> str | None:
    """Return the reason why the model can't be split into a layout's stages; else None."""
    try:
        if config.parallel.pp > 1:
            estimator.plan_pipeline(config)
    except UsageError as error:
        return _get_first_clause(str(error))
    return None


def _get_first_clause(text: str) -> str:
    """Return the part of an error message that many layouts share."""
    return text.removeprefix("Value error, ").partition(":")[0]


def _iter_parallel_sections(
    base: Config, gpus: int, gpus_per_node: int, refused: Counter[str]
) -> Iterator[ParallelConfig]:
    """Yield the parallel sections that are valid by themselves."""
    has_experts = any(key.endswith("n_experts") for key in base.model.tp_dims)
    for axes in _list_axis_sizes(gpus, gpus_per_node, has_experts):
        for schedule, virtual in SCHEDULES if axes[PIPELINE] > 1 else (("1f1b", None),):
            for zero, accumulation in STAGES:
                if (axes[SHARD] * axes[CONTEXT] == 1 and zero) or (axes[PIPELINE] > 1 and accumulation == "sharded"):
                    continue
                changes: dict[str, Any] = {
                    **axes,
                    "pp_schedule": schedule,
                    "virtual_stages": virtual,
                    "pp_split_points": [],
                    "zero": zero,
                    "grad_accumulation": accumulation,
                    "reduce_dtype": base.parallel.reduce_dtype,
                }
                try:
                    parallel = ParallelConfig.model_validate({**base.parallel.model_dump(), **changes})
                    compute_axis_sizes(parallel, gpus)
                except (ValidationError, UsageError) as error:
                    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                    refused[_get_first_clause(text)] += 1
                    continue
                yield parallel


def _list_axis_sizes(gpus: int, gpus_per_node: int, has_experts: bool) -> Iterator[dict[str, int]]:
    """Yield axis sizes whose product is the number of GPUs; tp stays within a node."""
    tp_sizes = [tp for tp in list_divisors(gpus) if tp <= gpus_per_node]
    row_sizes = [(tp, cp) for tp in tp_sizes for cp in (1, 2, 4, 8, 16) if gpus // tp % cp == 0]
    for tp, cp in row_sizes:
        for pp in list_divisors(gpus // (tp * cp)):
            data = gpus // (tp * cp * pp)
            for replicas in _list_replicas(data):
                shard = data // replicas
                for ep in list_divisors(shard * cp) if has_experts else (1,):
                    yield {TENSOR: tp, CONTEXT: cp, PIPELINE: pp, REPLICATE: replicas, SHARD: shard, EXPERT: ep}


def _list_replicas(data_ranks: int) -> list[int]:
    """Return the numbers of replicas: 1, and those that leave at least 8 ranks to shard over."""
    return [1, *(n for n in list_divisors(data_ranks) if n > 1 and data_ranks // n >= 8)]


# ------------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    """Overrides of a config, and the estimate with them."""

    overrides: Mapping[str, Any]
    estimate: Estimate

    def __str__(self) -> str:
        texts = (str(value).lower() if isinstance(value, bool) else value for value in self.overrides.values())
        return " ".join(f"{key}={text}" for key, text in zip(self.overrides, texts, strict=True))


def with_changes(config: Config, overrides: Mapping[str, Any]) -> Config | None:
    """Return the config with overrides; None if the rules of configs refuse them."""
    try:
        return config.with_changes(overrides)
    except (ValidationError, UsageError):
        return None


def find_fitting_changes(estimator: Estimator, estimate: Estimate) -> list[Change]:
    """Try the usual remedies one by one, then together; return those that fit, the fastest first."""
    fitting = []
    for overrides in _iter_remedies(estimate.config):
        change = try_change(estimator, overrides)
        if change is not None and change.estimate.fits:
            fitting.append(change)
    return sorted(fitting, key=lambda change: change.estimate.time.step)


def try_change(estimator: Estimator, overrides: Mapping[str, Any]) -> Change | None:
    """Estimate a change; None if it is refused."""
    config = with_changes(estimator.base, overrides)
    if config is None:
        return None
    try:
        return Change(overrides, estimator.estimate(config))
    except UsageError:
        return None


def _iter_remedies(config: Config) -> Iterator[dict[str, Any]]:
    parallel, train = config.parallel, config.train
    singles: list[dict[str, Any]] = []
    if train.micro_batch > 1:
        singles.append({"train.micro_batch": 1})
    if train.recompute == "none":
        singles.append({"train.recompute": "selective"})
    if train.recompute != "full":
        singles.append({"train.recompute": "full"})
    if parallel.zero >= 2 and parallel.grad_accumulation == "unsharded" and parallel.pp == 1:
        singles.append({"parallel.grad_accumulation": "sharded"})
    if parallel.zero < 3:
        singles.append({"parallel.zero": 3})
    yield from singles
    combined: dict[str, Any] = {}
    for single in singles:
        combined |= single
        if len(combined) > 1:
            yield dict(combined)
    for tp in (2, 4, 8):
        if tp > parallel.tp:
            yield {"parallel.tp": tp, "parallel.dp_shard": -1}
            yield {"parallel.tp": tp, "parallel.dp_shard": -1, **combined}


def find_largest_micro_batch(estimator: Estimator, estimate: Estimate) -> int | None:
    """Return the largest micro-batch that fits and divides a rank's share of the batch; None if not even 1 fits."""
    share = estimate.microbatches * estimate.config.train.micro_batch
    largest = None
    for size in MICRO_BATCHES:
        if size > share or share % size:
            continue
        change = try_change(estimator, {"train.micro_batch": size})
        if change is None or not change.estimate.fits:
            break
        largest = size
    return largest
