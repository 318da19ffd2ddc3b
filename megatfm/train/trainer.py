"""One rank's training: the loop, the training step, evaluations and rollbacks."""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from megatfm import checkpoint
from megatfm.checkpoint.directory import name_checkpoint
from megatfm.config.world_size import list_layout_changes
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import EpochCounter
from megatfm.engines.interface import Engine, LossTotals
from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from megatfm.files import to_strict_json
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.optim.lr_schedules import compute_schedule_factor
from megatfm.tracking import hardware
from megatfm.tracking.metrics import MetricsLog, StepTimes
from megatfm.tracking.utilization import Utilization
from megatfm.train import resume
from megatfm.train.build import describe_size
from megatfm.train.corpora import Corpora, MixtureSources
from megatfm.train.evaluation import Evaluator
from megatfm.train.process_state import GarbageCollection
from megatfm.train.profiling import StepProfile, get_memory_bytes
from megatfm.train.resilience import compare_replicas, forward_backward_with_replay
from megatfm.train.resume import UNEVALUATED
from megatfm.train.run_state import RunContext, RunState
from megatfm.train.signals import Agree, StopRequested, StopSignals
from megatfm.train.startup_checks import preflight

log = logging.getLogger("megatfm")


class Trainer:
    """The training loop of one rank, from a `RunState` to the end of the run or the next signal."""

    def __init__(
        self,
        context: RunContext,
        engine: Engine,
        corpora: Corpora,
        evaluator: Evaluator,
        precision: str,
        utilization: Utilization | None = None,
    ) -> None:
        self.context, self.config, self.run = context, context.config, context.run
        self.run_log, self.monitor, self.decisions = context.run_log, context.monitor, context.decisions
        self.engine, self.corpora, self.evaluator = engine, corpora, evaluator
        self.precision, self.utilization = precision, utilization
        self.state = RunState(context, engine, corpora, precision)
        self.saver = self.state.saver
        self.mixture_sources = MixtureSources(self.config, corpora)
        self.garbage = GarbageCollection(self.config.train.gc_every)
        self.monitor.save_thread_id = lambda: self.saver.thread_id
        self.run.is_saving = lambda: self.saver.step_in_progress is not None
        self._save_seconds: float | None = None

    def train(self, signals: StopSignals) -> int:
        """Train until the run ends or a signal tells it to stop; return the exit code."""
        state = self.state
        stop, _ = signals.agree()  # a signal during the start: there is nothing to save yet
        self.epochs = EpochCounter(self.corpora.stored_rows, state.position)
        with StepProfile(self.config.log.profile, self.run, self.engine.device) as profile, self.garbage, self.saver:
            while not state.is_over and not stop:
                stop = self._train_until_interrupted(signals, profile)
        if not state.is_over:
            self._log_event("stopped", f"by {stop} after step {state.step}: the same command resumes from there")
            return EXIT_REQUEUE
        early_reason = f": {state.best.reason}" if state.step < self.config.train.steps else ""
        detail = f"step {state.step}, {state.tokens:,} tokens{early_reason}"
        self._log_event("finished early" if early_reason else "finished", detail)
        return EXIT_OK

    def _train_until_interrupted(self, signals: StopSignals, profile: StepProfile) -> str | None:
        """Train until the run ends, a stop signal arrives (returns its name), or the position in the data jumps, which
        it does after a rollback and where the decision log says so."""
        config, state, stop = self.config, self.state, None
        agreed = signals.agree_deferred if self.engine.device.type == "cuda" else signals.agree
        with state.make_loader() as loader, self._open_metrics() or nullcontext() as metrics:
            self.run.keep()
            if state.unevaluated:
                stop = self._finish_evaluation(state.unevaluated, agreed, metrics)
            while not state.is_over and not stop:
                profile.before_step(state.step + 1)
                record = self.train_step(loader)
                self.garbage.after_step(state.step)
                self.run.check_not_moved()
                if "skipped" not in record and self._roll_back_after_spike(record["loss"]):
                    break
                stop = self._evaluate(record, agreed)
                if metrics and not state.unevaluated:
                    metrics.write(record)
                self.run_log.step(record, self._is_due(config.log.every))
                save_shared = state.is_over or state.best.step == state.step or self._is_due(config.checkpoint.every)
                local_every = config.checkpoint.local_every
                save_local = local_every > 0 and state.step % local_every == 0
                if not stop:
                    stop, is_saving = agreed(save_shared or save_local or self.saver.step_in_progress is not None)
                    if not is_saving:
                        self.saver.wait_for_save()  # on all ranks at the same step, so that all raise its error
                save_shared = save_shared or stop is not None
                if save_shared or save_local:
                    self.monitor.tick(state.step, "save")
                    if metrics:
                        metrics.sync()
                    self._save_seconds = state.save(loader, local=not save_shared)
                if state.step in self.decisions.data_resume_positions:
                    state.position = self.decisions.data_resume_positions[state.step]
                    break
        return stop

    def _evaluate(self, record: dict[str, Any], agreed: Agree) -> str | None:
        """Add the results of an evaluation, if one is due, to a step's metrics. Return the signal that interrupted it,
        between two batches or sampled tokens; None if none did."""
        state = self.state
        if not self._is_due(self.config.evaluate.every):
            return None

        def check_batch() -> None:
            self.monitor.tick(state.step, "evaluation")
            if stop := agreed(True)[0]:
                raise StopRequested(stop)

        try:
            record |= self.evaluator.evaluate(state.step, check_batch)
        except StopRequested as stop:
            state.unevaluated = json.loads(to_strict_json(record))
            log.info("step %d  %s interrupts the evaluation: the next start repeats it", state.step, stop)
            return str(stop)
        state.best.update(state.step, record["evaluation"])
        return None

    def _finish_evaluation(self, record: dict[str, Any], agreed: Agree, metrics: MetricsLog | None) -> str | None:
        """Repeat the evaluation that the last stop interrupted; complete the metrics and the checkpoint of its step,
        unless that is another run's. Return the signal that interrupts it again; None if none does."""
        state = self.state
        state.unevaluated = None
        if stop := self._evaluate(record, agreed):
            return stop
        if metrics:
            metrics.write(record)
            metrics.sync()
        if not state.is_branch:
            best, path = state.best.state_dict(), self.run.checkpoints / name_checkpoint(state.step)
            run_on_rank_0_raising(lambda: checkpoint.update_state(path, {UNEVALUATED: None, **best}))
        return None

    def train_step(self, loader: DataLoader) -> dict[str, Any]:
        """Take one optimizer step: forward and backward of a global batch, clip, update; return its metrics."""
        config, state, engine = self.config, self.state, self.engine
        times, wait_seconds = StepTimes(), loader.wait_seconds
        self.monitor.tick(state.step, "step")
        every = config.log.layer_stats_every
        collect_statistics = every > 0 and (state.step + 1) % every == 0
        with times.measure("passes"):
            totals = self._forward_backward(loader, collect_statistics)
        state.step, state.position = state.step + 1, loader.position
        for name, epoch in self.epochs.advance(state.position).items():
            log.info("step %d  epoch %d of %s begins", state.step, epoch, name or "the corpus")
        norms = engine.layer_statistics() if collect_statistics else None
        # Clip to `optimizer.max_grad_norm` and update the weights, unless loss or gradient is not finite.
        lr = config.optimizer.lr * compute_schedule_factor(config.lr_schedule, state.step, config.train.steps)
        self.saver.wait_for_staging()  # the update modifies tensors that a save in the background may still read
        with times.measure("optimizer"):
            grad_norm, skipped = state.loss_guard.take_step(engine, state.step, totals, lr)
        if skipped:
            self._log_event("skipped", skipped)
        compare_replicas(engine, state.step, config.resilience.compare_replicas_every)

        state.tokens += loader.step_tokens
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
            "step": state.step,
            "tokens": state.tokens,
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

    def _forward_backward(self, loader: DataLoader, collect_statistics: bool) -> LossTotals:
        """Compute the gradients of the next global batch, summed over micro-batches and data ranks."""
        microbatches = next(loader)
        return forward_backward_with_replay(
            self.engine,
            microbatches,
            self.corpora.objective,
            self.state.step + 1,
            replay_every=self.config.resilience.replay_every,
            collect_statistics=collect_statistics,
            sources=self.mixture_sources.look_up(loader),
        )

    def _open_metrics(self) -> MetricsLog | None:
        if not self.run.is_main:
            return None
        n_recorded = self.state.step - (self.state.unevaluated is not None)
        return MetricsLog.from_config(self.config, self.run.folder, n_recorded, self.state.is_branch)

    def _is_due(self, every: int) -> bool:
        """Return whether an action is due that happens every `every` steps and at the last step."""
        return self.state.step == self.config.train.steps or (every > 0 and self.state.step % every == 0)

    def _log_event(self, event: str, detail: str) -> None:
        step = f"step {self.state.step}  " if event in ("skipped", "spike", "rolled back") else ""
        log.info("%s%s: %s", step, event, detail)
        self.run.log_event(event, detail, self.state.step)

    def restore(self, latest: resume.ResumePoint | None, branch: resume.ResumePoint | None = None) -> None:
        """Load the newest checkpoint, else start from `branch`, another run's checkpoint, or anew; write config, layout
        and environment to the run directory."""
        config = self.config
        run_on_rank_0_raising(lambda: checkpoint.remove_leftovers(self.run.checkpoints))  # first, to make room
        if config.resilience.preflight:
            resume_step = latest.step if latest else None
            for line in preflight(config, self.run, self.engine, self.context.nodes, resume_step):
                self._log_event("slow", line)
        if latest:
            event, details = "resumed", [f"from {latest.path.name}", *self.state.resume(latest)]
        else:
            event, details = "started", self.state.start(branch)
        self._log_event(event, "; ".join([*details, *list_layout_changes(self.context.requested_config, config)]))
        launch_info = hardware.describe_launch(self.context.launcher)
        run_on_rank_0_raising(lambda: self._write_run_files(launch_info))
        self.run.announce_links()
        size = f"{describe_size(self.engine)}, {self.precision}"
        log.info("%s: %s, step %d of %d", self.run.folder, size, self.state.step, config.train.steps)
        peak = f"MFU is relative to {self.utilization.peak}" if self.utilization else ""
        for note in filter(None, [peak, *self.corpora.warnings, self.mixture_sources.note]):
            log.info("%s", note)

    def _write_run_files(self, launch_info: Mapping[str, str]) -> None:
        """Write the files that describe this start, on rank 0."""
        peak = {"peak": str(self.utilization.peak)} if self.utilization else {}
        table, device = self.engine.layout.table, self.engine.device
        self.run.write_run_files(self.context.requested_config, table, device, {**launch_info, **peak})

    def _roll_back_after_spike(self, loss: float) -> bool:
        """Roll back to a checkpoint after a loss spike, and skip the data since then; return whether this happened."""
        state = self.state
        if (score := state.loss_guard.observe(loss)) is None:
            return False
        detail = f"loss {loss:.4g} is {score:.0f} deviations above the median of the last steps"
        self.saver.wait_for_save()
        should_roll_back = self.config.resilience.spike == "rollback"
        point = resume.find_resume_point(self.run.checkpoints) if should_roll_back else None
        if point is None:
            self._log_event("spike", detail)
            return False
        state.loss_guard.record_rollback(state.step, point.step, state.position)
        self._log_event("rolled back", f"{detail}: from {point.path.name} on, without the data since then")
        state.load(point)
        return True
