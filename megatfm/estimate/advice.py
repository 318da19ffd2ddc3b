"""Advice: changes that make a run fit, and the largest micro-batch of a run that fits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.estimate.estimator import Estimate, Estimator

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of micro-batches that are tried."""


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
