"""The story of a run, from the config to the last checkpoint."""

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch

from megatfm import checkpoint
from megatfm.checkpoint.flow import progress
from megatfm.checkpoint.nodes import NodeTopology
from megatfm.config import Config
from megatfm.data import DataLoader, check_global_batch
from megatfm.engines.interface import PRECISIONS, Engine
from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from megatfm.parallel import bootstrap
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.train import resume
from megatfm.train.build import build_engine, choose_precision
from megatfm.train.corpora import Corpora, batch_schedule, open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate_sets
from megatfm.train.guards.elastic import elastic_config, layout_changes
from megatfm.train.guards.integrity import compare_replicas, forward_backward_with_replay
from megatfm.train.guards.preflight import preflight
from megatfm.train.guards.progress import check_progress
from megatfm.train.init_from import load_weights, origin_of
from megatfm.train.record.console import RunLog
from megatfm.train.record.machine import started
from megatfm.train.record.metrics import MetricsLog, RunInfo, check_sinks
from megatfm.train.record.run_directory import RunDirectory, run_folder
from megatfm.train.record.utilization import FlopsPerToken, Utilization, get_peak_flops
from megatfm.train.run_state import RunState
from megatfm.train.schedules import schedule_factor
from megatfm.train.signals import StopSignals
from megatfm.train.watching.flight_recorder import start_flight_recorder
from megatfm.train.watching.memory import (
    explain_out_of_memory,
    keep_freed_memory,
    memory_bytes,
    record_allocations,
    should_record_allocations,
)
from megatfm.train.watching.profile import StepProfile
from megatfm.train.watching.watch import RankMonitor

log = logging.getLogger("megatfm")


def train(config: Config, flops_per_token: FlopsPerToken | None = None) -> int:
    """Train or resume the run of a config; called on every rank. Returns the exit code.

    flops_per_token: tells what a token costs, so that the utilization of the devices is in the record.
    """
    import_plugins(config.plugins)
    check_sinks(config.log.sinks)  # before there is anything on the disk
    config, tokenizer = open_tokenizer(config)
    start_flight_recorder(run_folder(config), config.train.device)
    hang = config.train.hang_seconds
    with (
        bootstrap.distributed_session(
            max(hang, bootstrap.RENDEZVOUS_SECONDS), config.train.device, 1.5 * hang + 60
        ) as rank,
        RankMonitor(rank, hang) as watch,
        StopSignals(rank.device) as signals,
    ):
        watch.progress = progress
        if rank.device.type == "cpu":
            keep_freed_memory()
        given, config = config, elastic_config(config, rank.world_size)
        mesh = build_mesh(config.parallel, rank.world_size, rank.device.type)
        for batch in batch_schedule(config).batches:
            check_global_batch(batch, config.train.micro_batch, mesh.data_ranks)
        corpora = open_corpora(config, tokenizer)
        watch.tick(0, "start")
        with RunDirectory(run_folder(config), rank.rank) as run, RunLog(run, config.train.steps) as screen:
            watch.attach_run_log(run.log, run.log_failure)
            if rank.device.type == "cuda" and should_record_allocations(
                run.folder, config.log.memory_snapshot
            ):
                record_allocations()
            nodes = resume.discover_nodes(config, run)
            found = resume.find_resume_point(run.checkpoints, nodes, run.decisions)
            check_progress(run, found.step if found else 0, config.resilience.max_failures)
            wanted = config.train.precision
            branch = None
            if found is None and config.train.branch_from:
                branch = resume.branch_point(config.train.branch_from)
            if wanted == "auto" and (before := found or branch):
                wanted = before.state["precision"]
            watch.tick(0, "start")
            precision = choose_precision(wanted, rank.device)
            with explain_out_of_memory(run.folder, rank.rank):
                engine = build_engine(config, mesh, rank.device, precision)
            trainer = Trainer(config, run, engine, corpora, precision, screen, watch, nodes)
            trainer.given, trainer.launcher = given, rank.launcher
            if flops_per_token and run.is_main:
                peak_flops = get_peak_flops(rank.device, PRECISIONS[precision].compute_dtype)
                trainer.utilization = Utilization(*flops_per_token(config), peak_flops, rank.world_size)
            watch.tick(0, "start")
            with explain_out_of_memory(run.folder, rank.rank):
                trainer.restore(found, branch)
                return trainer.run_steps(signals)


class Trainer:
    """One process's share of a run."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        engine: Engine,
        corpora: Corpora,
        precision: str,
        screen: RunLog,
        watch: RankMonitor,
        nodes: NodeTopology | None = None,
    ) -> None:
        self.config, self.run, self.engine, self.corpora = config, run, engine, corpora
        self.run_log, self.watch = screen, watch
        self.given = config
        """The config before its layout was fitted to the processes that are there: a later start may have all again."""
        self.utilization: Utilization | None = None
        self.launcher = "none"
        self.is_branch = False
        self.state = RunState(config, run, engine, corpora, precision, nodes)
        watch.save_thread_id = lambda: self.state.saver.thread_id

    def restore(self, found: resume.ResumePoint | None, branch: resume.ResumePoint | None = None) -> None:
        """Go to where the newest checkpoint is, or to the start; leave the run's description on disk.

        branch: another run's checkpoint to start from.
        """
        config = self.config
        if config.resilience.preflight:
            for line in preflight(config, self.run, self.engine, self.state.nodes):
                self._event("slow", line)
        if found:
            said = self.state.resume_from(found)
            self._event(
                "resumed", "; ".join([f"from {found.path.name}", *said, *layout_changes(self.given, config)])
            )
        else:
            self.run.decisions.clear()
            self.state.remove_local_checkpoints_after(-1)
            detail = f"seed {config.train.seed}"
            if branch:
                self.is_branch = True
                detail = "; ".join(
                    [f"from {config.train.branch_from}", *self.state.resume_from(branch, own=False)]
                )
            elif config.train.init_from:
                takeover = load_weights(self.engine, config.train.init_from, config.train.init_include)
                if not config.train.init_include:
                    self.state.origin = origin_of(takeover.source, self.corpora.tokenizer_hash)
                detail = f"with {takeover}"
                for line in takeover.lines() if takeover.has_missing else ():
                    log.info("%s", line)
            self._event("started", "; ".join([detail, *layout_changes(self.given, config)]))
        facts = started(self.launcher)
        if self.run.is_main:
            facts |= {"peak": str(self.utilization.peak)} if self.utilization else {}
            self.run.write_run_files(self.given, self.engine.layout.table, facts)
            checkpoint.remove_leftovers(self.run.checkpoints)
        for link in (self.run.checkpoints, self.run.log.parent):
            if link.is_symlink():
                log.info("%s is a symbolic link: what it is for lies in %s", link, link.resolve())
        log.info(
            "%s: %s parameters, %s, %s, step %d of %d",
            self.run.folder,
            f"{sum(torch.Size(p.shape).numel() for p in self.engine.layout.values()):,}",
            self.engine.mesh.describe(),
            self.state.precision,
            self.state.step,
            config.train.steps,
        )
        if self.utilization:
            log.info("utilization (MFU) is of %s", self.utilization.peak)
        for note in self.corpora.warnings:
            log.info("%s", note)

    def run_steps(self, signals: StopSignals) -> int:
        """While tokens are due: step, log, evaluate, save; stop if asked."""
        stop, _ = signals.agreed()  # during the start: there is nothing to save yet
        with StepProfile(self.config.log.profile, self.run) as profile, self.state.saver:
            while self.state.step < self.config.train.steps and not stop:
                stop = self._train_until_interrupted(signals, profile)
        if self.state.step < self.config.train.steps:
            self._event(
                "stopped", f"by {stop} after step {self.state.step}: the same command goes on from there"
            )
            return EXIT_REQUEUE
        self._event("finished", f"step {self.state.step}, {self.state.tokens:,} tokens")
        return EXIT_OK

    def _train_until_interrupted(self, signals: StopSignals, profile: StepProfile) -> str | None:
        """Steps on data without a gap: to the end, to a signal (returned), or to a rollback or what one skips."""
        config, at, stop = self.config, self.state, None
        with self.state.loader() as loader, self._metrics() or nullcontext() as metrics:
            while at.step < config.train.steps and not stop:
                profile.before_step(at.step + 1)
                record = self._one_step(loader)
                self.run.check_not_moved()
                if "skipped" not in record and at.roll_back_after_spike(record["loss"], self._event):
                    break
                if self._is_due(config.evaluate.every):
                    record["evaluation"] = self._evaluate()
                if metrics:
                    metrics.write(record)
                self.run_log.step(record, self._is_due(config.log.every))
                stop, saving = signals.agreed(at.saver.step_in_progress is not None)
                if not saving:
                    at.saver.wait_for_save()  # on all ranks at the same step, so that all end with its error
                shared, local = stop or self._is_due(config.checkpoint.every), config.checkpoint.local_every
                if shared or (local and at.step % local == 0):
                    self.watch.tick(at.step, "save")
                    if metrics:
                        metrics.sync()
                    at.save(loader, local=not shared)
                if at.apply_data_skip():
                    break
        return stop

    def _one_step(self, loader: DataLoader) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics."""
        config, at, start, data_wait = self.config, self.state, time.perf_counter(), loader.wait_seconds
        self.watch.tick(at.step, "step")
        checks, objective = config.resilience, self.corpora.objective
        collect_statistics = (
            config.log.layer_stats_every > 0 and (at.step + 1) % config.log.layer_stats_every == 0
        )
        stats = forward_backward_with_replay(
            self.engine,
            next(loader),
            objective,
            at.step + 1,
            replay_every=checks.replay_every,
            watch=collect_statistics,
        )
        at.step, at.position = at.step + 1, loader.position
        norms = self.engine.layer_statistics() if collect_statistics else None
        lr = config.optimizer.lr * schedule_factor(config.lr_schedule, at.step, config.train.steps)
        at.saver.wait_for_staging()  # the forward and backward pass changed nothing of what is being saved
        grad_norm, skipped = at.loss_guard.guarded_step(self.engine, at.step, stats, lr)
        if skipped:
            self._event("skipped", skipped)
        compare_replicas(self.engine, at.step, checks.compare_replicas_every)
        at.tokens += loader.step_tokens
        seconds = time.perf_counter() - start
        return {
            "step": at.step,
            "tokens": at.tokens,
            "loss": stats.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": loader.step_tokens / seconds,
            **(self.utilization.mfu(loader.step_tokens / seconds) if self.utilization else {}),
            "data_wait_seconds": loader.wait_seconds - data_wait,
            "padding": loader.padding,
            "step_seconds": seconds,
            "memory_bytes": memory_bytes(self.engine.device),
            "time": time.time(),
            **({"terms": stats.terms} if stats.terms else {}),
            **({"norms": norms} if norms else {}),
            **({"skipped": True} if skipped else {}),
        }

    def _evaluate(self) -> dict[str, Any]:
        def moved() -> None:
            self.watch.tick(self.state.step, "evaluation")

        return evaluate_sets(self.engine, self.corpora, self.config, self.state.step, moved)

    def _metrics(self) -> MetricsLog | None:
        if not self.run.is_main:
            return None
        facts = RunInfo(
            self.run.folder,
            self.state.step,
            self.config.model_dump(mode="json"),
            self.config.log.wandb_project,
            self.is_branch,
        )
        return MetricsLog(facts, self.config.log.sinks)

    def _is_due(self, every: int) -> bool:
        """Every so many steps, and at the last."""
        return self.state.step == self.config.train.steps or (every > 0 and self.state.step % every == 0)

    def _event(self, event: str, detail: str) -> None:
        log.info("%s: %s", event, detail)
        self.run.log_event(event, detail, self.state.step)
