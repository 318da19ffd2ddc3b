"""Searches all layouts that the rules of configs allow: scores them quickly, and estimates the best in full.

Layouts are the combinations of axis sizes, ZeRO stages, schedules, micro-batches and recompute modes. The rules of
configs refuse a layout here too, with the same words.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, ParallelConfig, layout_checks
from megatfm.config.section import list_divisors
from megatfm.config.world_size import compute_axis_sizes
from megatfm.errors import UsageError
from megatfm.estimate.estimator import Estimate, Estimator
from megatfm.estimate.quick import QuickScores, Score
from megatfm.parallel.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR

MAX_ESTIMATES = 24
"""Largest number of layouts that are estimated in full."""
MAX_WITH_SAME_AXES = 3
"""Largest number of those with the same axis sizes."""
MAX_MEMORY_SHARE = 0.95
"""Share of the device's memory that a chosen layout may take: batches differ, and memory fragments."""
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
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class LayoutCandidate:
    """A legal layout and its score."""

    config: Config
    microbatches: int
    score: Score

    @property
    def axes(self) -> tuple[int, ...]:
        """Axis sizes."""
        parallel = self.config.parallel
        return parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp_replicate, parallel.dp_shard


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. best: full estimates that fit, the fastest first; tried, n_fit: number of layouts, and of
    those that fit by their score; refused: reason → layouts; smallest: legal layout with the least memory."""

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
        candidate = LayoutCandidate(config, microbatches, scores.score(config, microbatches))
        if candidate.score.n_bytes <= limit:
            fitting.append(candidate)
        if smallest is None or candidate.score.n_bytes < smallest.score.n_bytes:
            smallest = candidate
    tried += refused.total()
    estimates = [estimator.estimate(candidate.config) for candidate in select_candidates(fitting)]
    best = sorted((e for e in estimates if e.worst.total <= limit), key=lambda e: e.time.step)
    return SearchResult(best, tried, refused, len(fitting), time.monotonic() - start, smallest)


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
            for micro_batch in MICRO_BATCHES:
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
