"""One rank's training: the loop, the training step, checkpoints, resumes and rollbacks."""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.directory import name_checkpoint
from megatfm.checkpoint.local import NodeTopology, fetch_missing_files, remove_local_after
from megatfm.config import Config
from megatfm.config.world_size import list_layout_changes
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import EpochCounter
from megatfm.engines.interface import Engine
from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from megatfm.files import to_strict_json
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.optim.lr_schedules import compute_schedule_factor
from megatfm.tracking import hardware
from megatfm.tracking.console import RunLog
from megatfm.tracking.metrics import MetricsLog, StepTimes
from megatfm.tracking.run_directory import RunDirectory
from megatfm.tracking.utilization import Utilization
from megatfm.train import compatibility, resume
from megatfm.train.best_checkpoint import FINISHED_EARLY, BestCheckpoint
from megatfm.train.build import describe_size
from megatfm.train.corpora import Corpora, MixtureSources
from megatfm.train.decision_log import DecisionLog
from megatfm.train.evaluation import Evaluator
from megatfm.train.garbage_collection import GarbageCollection
from megatfm.train.init_from import check_adapter_scale, identify_checkpoint, load_weights, read_origin
from megatfm.train.profiling import StepProfile, get_memory_bytes
from megatfm.train.rank_monitor_client import RankMonitor
from megatfm.train.resilience import LossGuard, compare_replicas, forward_backward_with_replay
from megatfm.train.resume import UNEVALUATED
from megatfm.train.rng_state import empty_rng_state_dict, load_rng_state_dict, rng_state_dict, seed_all
from megatfm.train.signals import Agree, StopRequested, StopSignals
from megatfm.train.startup_checks import preflight
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


class Trainer:
    """One rank's state of a run (step, tokens, position in the data, engine), and the training loop."""

    def __init__(
        self,
        context: RunContext,
        engine: Engine,
        corpora: Corpora,
        evaluator: Evaluator,
        precision: str,
        utilization: Utilization | None = None,
    ) -> None:
        config, run, nodes = context.config, context.run, context.nodes
        self.context, self.config, self.run, self.nodes = context, config, run, nodes
        self.run_log, self.monitor, self.decisions = context.run_log, context.monitor, context.decisions
        self.engine, self.corpora, self.evaluator = engine, corpora, evaluator
        self.precision, self.utilization = precision, utilization
        self.step = self.tokens = self.position = 0
        self.provenance: dict[str, JsonValue] = {}
        self.unevaluated: dict[str, Any] | None = None
        """Metrics of the last step if a signal has interrupted its evaluation, which the next start repeats."""
        self.mixture_sources = MixtureSources(config, corpora)
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
        self.best, self.garbage = BestCheckpoint(config, run.checkpoints), GarbageCollection(config.train.gc_every)
        self.monitor.save_thread_id = lambda: self.saver.thread_id
        seed_all(config.train.seed, run.rank)
        self.is_branch = False
        self._save_seconds: float | None = None

    def train(self, signals: StopSignals) -> int:
        """Train until the run ends or a signal tells it to stop; return the exit code."""
        stop, _ = signals.agree()  # a signal during the start: there is nothing to save yet
        self.epochs = EpochCounter(self.corpora.stored_rows, self.position)
        with StepProfile(self.config.log.profile, self.run, self.engine.device) as profile, self.garbage, self.saver:
            while not self._is_over and not stop:
                stop = self._train_until_interrupted(signals, profile)
        if not self._is_over:
            self._log_event("stopped", f"by {stop} after step {self.step}: the same command resumes from there")
            return EXIT_REQUEUE
        early_reason = f": {self.best.reason}" if self.step < self.config.train.steps else ""
        detail = f"step {self.step}, {self.tokens:,} tokens{early_reason}"
        self._log_event(FINISHED_EARLY if early_reason else "finished", detail)
        return EXIT_OK

    def _train_until_interrupted(self, signals: StopSignals, profile: StepProfile) -> str | None:
        """Train until the run ends, a stop signal arrives (returns its name), or the position in the data jumps, which
        it does after a rollback and where the decision log says so."""
        config, stop = self.config, None
        agreed = signals.agree_deferred if self.engine.device.type == "cuda" else signals.agree
        with self._make_loader() as loader, self._open_metrics() or nullcontext() as metrics:
            self.run.keep()
            if self.unevaluated:
                stop = self._finish_evaluation(self.unevaluated, agreed, metrics)
            while not self._is_over and not stop:
                profile.before_step(self.step + 1)
                record = self.train_step(loader)
                self.garbage.after_step(self.step)
                self.run.check_not_moved()
                if "skipped" not in record and self._roll_back_after_spike(record["loss"]):
                    break
                stop = self._evaluate(record, agreed)
                if metrics and not self.unevaluated:
                    metrics.write(record)
                self.run_log.step(record, self._is_due(config.log.every))
                save_shared = self._is_over or self.best.step == self.step or self._is_due(config.checkpoint.every)
                local_every = config.checkpoint.local_every
                save_local = local_every > 0 and self.step % local_every == 0
                if not stop:
                    stop, is_saving = agreed(save_shared or save_local or self.saver.step_in_progress is not None)
                    if not is_saving:
                        self.saver.wait_for_save()  # on all ranks at the same step, so that all raise its error
                save_shared = save_shared or stop is not None
                if save_shared or save_local:
                    self.monitor.tick(self.step, "save")
                    if metrics:
                        metrics.sync()
                    self._save(loader, local=not save_shared)
                if self.step in self.decisions.data_resume_positions:
                    self.position = self.decisions.data_resume_positions[self.step]
                    break
        return stop

    def _evaluate(self, record: dict[str, Any], agreed: Agree) -> str | None:
        """Add the results of an evaluation, if one is due, to a step's metrics. Return the signal that interrupted it,
        between two batches or sampled tokens; None if none did."""
        if not self._is_due(self.config.evaluate.every):
            return None

        def check_batch() -> None:
            self.monitor.tick(self.step, "evaluation")
            if stop := agreed(True)[0]:
                raise StopRequested(stop)

        try:
            record |= self.evaluator.evaluate(self.step, check_batch)
        except StopRequested as stop:
            self.unevaluated = json.loads(to_strict_json(record))
            log.info("step %d  %s interrupts the evaluation: the next start repeats it", self.step, stop)
            return str(stop)
        self.best.update(self.step, record["evaluation"])
        return None

    def _finish_evaluation(self, record: dict[str, Any], agreed: Agree, metrics: MetricsLog | None) -> str | None:
        """Repeat the evaluation that the last stop interrupted; complete the metrics and the checkpoint of its step.
        Return the signal that interrupts it again; None if none does."""
        self.unevaluated = None
        if stop := self._evaluate(record, agreed):
            return stop
        if metrics:
            metrics.write(record)
            metrics.sync()
        best, path = self.best.state_dict(), self.run.checkpoints / name_checkpoint(self.step)
        run_on_rank_0_raising(lambda: checkpoint.update_state(path, {UNEVALUATED: None, **best}))
        return None

    def train_step(self, loader: DataLoader) -> dict[str, Any]:
        """Take one optimizer step: forward and backward of a global batch, clip, update; return its metrics."""
        config, engine, checks = self.config, self.engine, self.config.resilience
        times, wait_seconds = StepTimes(), loader.wait_seconds
        self.monitor.tick(self.step, "step")

        # Forward and backward passes; gradients are summed over micro-batches and data ranks.
        every = config.log.layer_stats_every
        collect_statistics = every > 0 and (self.step + 1) % every == 0
        with times.measure("passes"):
            microbatches = next(loader)
            totals = forward_backward_with_replay(
                engine,
                microbatches,
                self.corpora.objective,
                self.step + 1,
                replay_every=checks.replay_every,
                collect_statistics=collect_statistics,
                sources=self.mixture_sources.look_up(loader),
            )
        self.step, self.position = self.step + 1, loader.position
        for name, epoch in self.epochs.advance(self.position).items():
            log.info("step %d  epoch %d of %s begins", self.step, epoch, name or "the corpus")
        norms = engine.layer_statistics() if collect_statistics else None
        # Clip to `optimizer.max_grad_norm` and update the weights, unless loss or gradient is not finite.
        lr = config.optimizer.lr * compute_schedule_factor(config.lr_schedule, self.step, config.train.steps)
        self.saver.wait_for_staging()  # the update modifies tensors that a save in the background may still read
        with times.measure("optimizer"):
            grad_norm, skipped = self.loss_guard.take_step(engine, self.step, totals, lr)
        if skipped:
            self._log_event("skipped", skipped)
        compare_replicas(engine, self.step, checks.compare_replicas_every)

        self.tokens += loader.step_tokens
        seconds = times.stop(loader.wait_seconds - wait_seconds)
        speed = loader.step_tokens / seconds["step_seconds"]
        periodic_metrics = {
            "save_seconds": self._save_seconds,
            "terms": totals.terms,
            "loss_by_source": totals.loss_by_source,
            "norms": norms,
        }
        self._save_seconds = None
        return {
            "step": self.step,
            "tokens": self.tokens,
            "loss": totals.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": speed,
            **(self.utilization.compute_mfu(speed) if self.utilization else {}),
            **seconds,
            "padding": loader.padding,
            "memory_bytes": get_memory_bytes(engine.device),
            "time": time.time(),
            **{key: value for key, value in periodic_metrics.items() if value},
            **({"skipped": True} if skipped else {}),
        }

    def _make_loader(self) -> DataLoader:
        return self.corpora.train_loader(self.config, self.engine.mesh, self.step, self.position)

    def _open_metrics(self) -> MetricsLog | None:
        if not self.run.is_main:
            return None
        n_recorded = self.step - (self.unevaluated is not None)
        return MetricsLog.from_config(self.config, self.run.folder, n_recorded, self.is_branch)

    def _is_due(self, every: int) -> bool:
        """Return whether an action is due that happens every `every` steps and at the last step."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    @property
    def _is_over(self) -> bool:
        """Whether the last step is done, with its evaluation, or early stopping (`train.patience`) ends the run."""
        return not self.unevaluated and (self.step >= self.config.train.steps or self.best.is_stale)

    def _log_event(self, event: str, detail: str) -> None:
        log.info("%s%s: %s", f"step {self.step}  " * (event in ("skipped", "spike", "rolled back")), event, detail)
        self.run.log_event(event, detail, self.step)

    def restore(self, latest: resume.ResumePoint | None, branch: resume.ResumePoint | None = None) -> None:
        """Load the newest checkpoint, else start from `branch`, another run's checkpoint, or anew; write config, layout
        and environment to the run directory."""
        config = self.config
        run_on_rank_0_raising(lambda: checkpoint.remove_leftovers(self.run.checkpoints))  # first, to make room
        if config.resilience.preflight:
            for line in preflight(config, self.run, self.engine, self.nodes):
                self._log_event("slow", line)
        if latest:
            event, details = "resumed", [f"from {latest.path.name}", *self._resume_from(latest)]
        else:
            event, details = "started", self._start(branch)
        self._log_event(event, "; ".join([*details, *list_layout_changes(self.context.requested_config, config)]))
        launch_info = hardware.describe_launch(self.context.launcher)
        run_on_rank_0_raising(lambda: self._write_run_files(launch_info))
        self.run.announce_links()
        size = f"{describe_size(self.engine)}, {self.precision}"
        log.info("%s: %s, step %d of %d", self.run.folder, size, self.step, config.train.steps)
        peak = f"MFU is relative to {self.utilization.peak}" if self.utilization else ""
        for note in filter(None, [peak, *self.corpora.warnings, self.mixture_sources.note]):
            log.info("%s", note)

    def _write_run_files(self, launch_info: Mapping[str, str]) -> None:
        """Write the files that describe this start, on rank 0."""
        peak = {"peak": str(self.utilization.peak)} if self.utilization else {}
        table, device = self.engine.layout.table, self.engine.device
        self.run.write_run_files(self.context.requested_config, table, device, {**launch_info, **peak})

    def _start(self, branch: resume.ResumePoint | None) -> list[str]:
        """Start with new weights, or from another run's checkpoint or weights; return details for the log."""
        config = self.config
        self.decisions.clear()
        remove_local_after(self.nodes, -1)
        if branch:
            self.is_branch = True
            return [f"from {config.train.branch_from}", *self._resume_from(branch, same_run=False)]
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

    def _resume_from(self, point: resume.ResumePoint, *, same_run: bool = True) -> list[str]:
        """Continue from a checkpoint of this run or another; return details for the log."""
        with self._make_loader() as loader:
            current = self._make_run_state(loader)
        is_same_model = current["config"]["model"] == point.state["config"]["model"]
        mismatch = "" if is_same_model else compatibility.describe_shape_mismatch(point, self.engine.layout)
        allow: list[str] = [*self.config.resume.allow]
        allowed = compatibility.check_compatible(point, current, allow, mismatch, same_run=same_run)
        if same_run:
            self.decisions.read()
            may_fix_skips = compatibility.find_changes_that_may_fix_skips(allowed)
            if steps := self.decisions.retry_after(point.step) if may_fix_skips else ():
                allowed.append(f"skipped steps are tried again: {', '.join(map(str, steps))}")
        self._load_checkpoint(point)
        if not same_run:
            self.saver.verified = self.unevaluated = None
        return [*allowed, *compatibility.describe_hardware_changes(point, self.hardware)]

    def _load_checkpoint(self, point: resume.ResumePoint) -> None:
        """Load a checkpoint. If the decision log skips data after its step, continue behind the skipped data."""
        remove_local_after(self.nodes, point.step)  # local checkpoints that a rollback discards
        names = resume.read_stored_tensors(point)
        state_dict = self.engine.empty_state_dict(names)
        rank, device = self.run.rank, self.engine.device
        rng_state = empty_rng_state_dict(names, rank, dist.get_world_size(), device)
        destinations = state_dict | rng_state
        if point.local and self.nodes:
            shards = {n: checkpoint.ShardedTensor.from_tensor(tensor) for n, tensor in destinations.items()}
            fetch_missing_files(self.nodes, point.local, shards)
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

    def _roll_back_after_spike(self, loss: float) -> bool:
        """Roll back to a checkpoint after a loss spike, and skip the data since then; return whether this happened."""
        if (score := self.loss_guard.observe(loss)) is None:
            return False
        detail = f"loss {loss:.4g} is {score:.0f} deviations above the median of the last steps"
        self.saver.wait_for_save()
        should_roll_back = self.config.resilience.spike == "rollback"
        point = resume.find_resume_point(self.run.checkpoints) if should_roll_back else None
        if point is None:
            self._log_event("spike", detail)
            return False
        self.loss_guard.record_rollback(self.step, point.step, self.position)
        self._log_event("rolled back", f"{detail}: from {point.path.name} on, without the data since then")
        self._load_checkpoint(point)
        return True

    def _save(self, loader: DataLoader, local: bool = False) -> None:
        """Start saving a checkpoint. Tensors must not change before `saver.wait_for_staging`. A collective."""
        start = time.perf_counter()
        tensors = {**self.engine.state_dict(), **rng_state_dict(self.run.rank, self.engine.device)}
        state, best = self._make_run_state(loader), self.best.path
        self.saver.save(self.step, tensors, state, wait_for_staging=False, local=local, pinned=best)
        self._save_seconds = time.perf_counter() - start

    def _make_run_state(self, loader: DataLoader) -> dict[str, Any]:
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
