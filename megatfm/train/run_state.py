"""The state of a run on one rank beside its engine: its start, resumes and rollbacks, and what checkpoints store."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.directory import name_checkpoint
from megatfm.checkpoint.local import NodeTopology, fetch_missing_files, remove_local_after
from megatfm.checkpoint.reader import to_sharded_tensors
from megatfm.config import Config
from megatfm.data.loader import DataLoader
from megatfm.engines.interface import Engine
from megatfm.files import replace_non_finite
from megatfm.tracking import hardware
from megatfm.tracking.console import RunLog
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train import compatibility
from megatfm.train.corpora import Corpora
from megatfm.train.decision_log import DecisionLog
from megatfm.train.init_from import check_adapter_scale, identify_checkpoint, load_weights, read_origin
from megatfm.train.process_state import empty_rng_state_dict, load_rng_state_dict, rng_state_dict, seed_all
from megatfm.train.rank_monitor_client import RankMonitor
from megatfm.train.resilience import LossGuard
from megatfm.train.resume import UNEVALUATED, ResumePoint, read_stored_tensors
from megatfm.version import __version__

log = logging.getLogger("megatfm")


@dataclass(frozen=True)
class RunContext:
    """A run on this rank: its config, its files, and its monitor."""

    config: Config
    requested_config: Config
    """The config before `adapt_layout` adapted it, as the run directory stores it."""
    run: RunDirectory
    run_log: RunLog
    monitor: RankMonitor
    decisions: DecisionLog
    nodes: NodeTopology | None
    """Local disks of nodes; None if checkpoints are in the run directory alone."""
    launcher: str


class BestCheckpoint:
    """Tracks the step with the best metric so far; the first one if several are equal.

    The metric is the task's `best_by`; without a task it is the loss if `train.patience` is set, else nothing is
    tracked.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder, self._patience = folder, config.train.patience
        self._metric = config.task.best_by if config.task else "loss" if self._patience else None
        self.step: int | None = None
        self.value, self.evaluations_since = 0.0, 0

    def update(self, step: int, evaluation: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare the results of a step's evaluation (validation set → results) with the best ones so far."""
        first = next(iter(evaluation.values()), {})
        if self._metric is None or not first:
            return
        by_loss = self._metric == "loss"
        value = -float(first["loss"]) if by_loss else float(first["metrics"][self._metric])
        self.evaluations_since += 1
        is_first_number = math.isnan(self.value) and not math.isnan(value)
        if self.step is None or value > self.value or is_first_number:
            self.step, self.value, self.evaluations_since = step, value, 0

    @property
    def is_stale(self) -> bool:
        """Whether the last `train.patience` evaluations brought no improvement, so that the run ends."""
        return 0 < self._patience <= self.evaluations_since

    @property
    def reason(self) -> str:
        """Why early stopping ends the run."""
        return f"{self._metric} was best at step {self.step}, {self.evaluations_since} evaluations before"

    @property
    def path(self) -> Path | None:
        """Folder of the best checkpoint, which must not be deleted; None before the first evaluation."""
        return None if self.step is None else self._folder / name_checkpoint(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        if self._metric is None or self.step is None:
            return {}
        best = {"step": self.step, "metric": self._metric, "value": replace_non_finite(self.value)}
        return {"best": best | {"evaluations_since": self.evaluations_since}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint, if it is of the same metric; else the initial state."""
        stored = state.get("best")
        self.step, self.value, self.evaluations_since = None, 0.0, 0
        if self._metric and isinstance(stored, Mapping) and stored.get("metric") == self._metric:
            self.step, self.value = int(stored["step"]), float(stored["value"])
            self.evaluations_since = int(stored.get("evaluations_since", 0))


class RunState:
    """How far a run is: step, tokens, position in the data, best checkpoint, and the losses that `LossGuard` watches.

    The engine holds the tensors; together they are what a checkpoint stores.
    """

    def __init__(self, context: RunContext, engine: Engine, corpora: Corpora, precision: str) -> None:
        config, run, nodes = context.config, context.run, context.nodes
        self.config, self.run, self.nodes, self.decisions = config, run, nodes, context.decisions
        self.engine, self.corpora, self.precision = engine, corpora, precision
        self.step = self.tokens = self.position = 0
        self.provenance: dict[str, JsonValue] = {}
        self.unevaluated: dict[str, Any] | None = None
        """Metrics of the last step if a signal has interrupted its evaluation, which the next start repeats."""
        self.is_branch = False
        self.best = BestCheckpoint(config, run.checkpoints)
        self.loss_guard = LossGuard(config.resilience, config.optimizer.max_grad_norm, self.decisions)
        self.hardware = hardware.gather_hardware(engine.device)
        self.saver = checkpoint.Saver(
            run.checkpoints,
            mode=config.checkpoint.mode,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            verify_after_write=config.checkpoint.verify_after_write,
            local_dir=nodes.folder if nodes else None,
        )
        seed_all(config.train.seed, run.rank)

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, with its evaluation, or early stopping (`train.patience`) ends the run."""
        return not self.unevaluated and (self.step >= self.config.train.steps or self.best.is_stale)

    def make_loader(self) -> DataLoader:
        """Return a loader of the data after the present position. A collective."""
        return self.corpora.train_loader(self.config, self.engine.mesh, self.step, self.position)

    def start(self, branch: ResumePoint | None) -> list[str]:
        """Start with new weights, or from another run's checkpoint or weights; return details for the log."""
        config = self.config
        self.decisions.clear()
        remove_local_after(self.nodes, -1)
        if branch:
            self.is_branch = True
            return [f"from {config.train.branch_from}", *self.resume(branch, same_run=False)]
        if not config.train.init_from:
            return [f"seed {config.train.seed}"]
        report = load_weights(self.engine, config.train.init_from, config.train.init_include)
        check_adapter_scale(report, config.model.lora)
        if config.model.lora:
            self.provenance["base"] = identify_checkpoint(report.source)
        if not config.train.init_include and (origin := read_origin(report.source, self.corpora.tokenizer_hash)):
            self.provenance["origin"] = origin
        for line in report.format_table() if report.missing else ():
            log.info("%s", line)
        return [f"with {report}"]

    def resume(self, point: ResumePoint, *, same_run: bool = True) -> list[str]:
        """Continue from a checkpoint of this run or another; return details for the log."""
        with self.make_loader() as loader:
            current = self._to_json(loader)
        is_same_model = current["config"]["model"] == point.state["config"]["model"]
        mismatch = "" if is_same_model else compatibility.describe_shape_mismatch(point, self.engine.layout)
        allow: list[str] = [*self.config.resume.allow]
        allowed = compatibility.check_compatible(point, current, allow, mismatch, same_run=same_run)
        if same_run:
            self.decisions.read()
            may_fix_skips = compatibility.find_changes_that_may_fix_skips(allowed)
            if steps := self.decisions.retry_after(point.step) if may_fix_skips else ():
                allowed.append(f"skipped steps are tried again: {', '.join(map(str, steps))}")
        self.load(point)
        if not same_run:
            self.saver.verified = None
        return [*allowed, *compatibility.describe_hardware_changes(point, self.hardware)]

    def load(self, point: ResumePoint) -> None:
        """Load a checkpoint. If the decision log skips data after its step, continue behind the skipped data."""
        remove_local_after(self.nodes, point.step)  # local checkpoints that a rollback discards
        names = read_stored_tensors(point)
        state_dict = self.engine.empty_state_dict(names)
        rank, device = self.run.rank, self.engine.device
        rng_state = empty_rng_state_dict(names, rank, dist.get_world_size(), device)
        destinations = state_dict | rng_state
        if point.local and self.nodes:
            fetch_missing_files(self.nodes, point.local, to_sharded_tensors(destinations))
        checkpoint.load(point.path, destinations)
        self.engine.load_state_dict(state_dict)
        load_rng_state_dict(rng_state, rank, device)
        self.saver.verified = point.path if point.local is None else None
        self.step, self.tokens = point.step, int(point.state["tokens"])
        position = int(point.state["data"]["position"])
        self.position = self.decisions.data_resume_positions.get(self.step, position)
        self.loss_guard.load_state_dict(point.state.get("trouble", {}))
        self.provenance = {key: point.state[key] for key in ("origin", "base") if point.state.get(key)}
        self.best.load_state_dict(point.state)
        self.unevaluated = point.state.get(UNEVALUATED)

    def save(self, loader: DataLoader, *, local: bool = False) -> float:
        """Start saving a checkpoint; return the seconds that this took. Tensors must not change before
        `saver.wait_for_staging`. A collective."""
        start = time.perf_counter()
        tensors = {**self.engine.state_dict(), **rng_state_dict(self.run.rank, self.engine.device)}
        state, best = self._to_json(loader), self.best.path
        self.saver.save(self.step, tensors, state, wait_for_staging=False, local=local, pinned=best)
        return time.perf_counter() - start

    def _to_json(self, loader: DataLoader) -> dict[str, Any]:
        """Return the JSON state of a checkpoint."""
        return {
            **self.provenance,
            **self.best.state_dict(),
            **({UNEVALUATED: self.unevaluated} if self.unevaluated else {}),
            "step": self.step,
            "tokens": self.tokens,
            "precision": self.precision,
            "tokenizer": self.corpora.tokenizer_hash,
            "data": loader.state_dict(),
            "trouble": self.loss_guard.state_dict(),
            "machines": self.hardware,
            "config": self.config.model_dump(mode="json"),
            "megatfm": __version__,
        }
