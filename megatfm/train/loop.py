"""The story of a run, from the config to the last checkpoint."""

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch

from megatfm import checkpoint
from megatfm.checkpoint.flow import progress
from megatfm.checkpoint.nodes import Nodes
from megatfm.config import Config
from megatfm.data import Loader, check_batch
from megatfm.engines.interface import PRECISIONS, Engine
from megatfm.errors import DONE, REQUEUE
from megatfm.parallel import bootstrap
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.train import resume
from megatfm.train.build import build_engine, choose_precision
from megatfm.train.corpora import Corpora, batch_schedule, open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate_sets
from megatfm.train.guards.elastic import elastic_config, layout_changes
from megatfm.train.guards.integrity import compare_replicas, forward_backward
from megatfm.train.guards.preflight import preflight
from megatfm.train.guards.progress import check_progress
from megatfm.train.init_from import load_weights, origin_of
from megatfm.train.record.console import RunLog
from megatfm.train.record.machine import started
from megatfm.train.record.metrics import MetricsLog, RunFacts, check_sinks
from megatfm.train.record.run_directory import RunDirectory, run_folder
from megatfm.train.record.utilization import FlopsPerToken, Utilization, peak
from megatfm.train.run_state import RunState
from megatfm.train.schedules import factor
from megatfm.train.signals import StopSignals
from megatfm.train.watching.flight_recorder import start_flight_recorder
from megatfm.train.watching.memory import (
    explained,
    keep_freed_memory,
    memory_bytes,
    record_allocations,
    wants_stacks,
)
from megatfm.train.watching.profile import StepProfile
from megatfm.train.watching.watch import Watch

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
        bootstrap.joined(max(hang, bootstrap.MEET_SECONDS), config.train.device, 1.5 * hang + 60) as rank,
        Watch(rank, hang) as watch,
        StopSignals(rank.device) as signals,
    ):
        watch.progress = progress
        if rank.device.type == "cpu":
            keep_freed_memory()
        given, config = config, elastic_config(config, rank.world_size)
        mesh = build_mesh(config.parallel, rank.world_size, rank.device.type)
        for batch in batch_schedule(config).batches:
            check_batch(batch, config.train.micro_batch, mesh.data_ranks)
        corpora = open_corpora(config, tokenizer)
        watch.tick(0, "start")
        with RunDirectory(run_folder(config), rank.rank) as run, RunLog(run, config.train.steps) as screen:
            watch.log_to(run.log, run.report)
            if rank.device.type == "cuda" and wants_stacks(run.folder, config.log.allocations):
                record_allocations()
            nodes = resume.meet_nodes(config, run)
            found = resume.find(run.checkpoints, nodes, run.decisions)
            check_progress(run, found.step if found else 0, config.resilience.max_failures)
            wanted = config.train.precision
            branch = None
            if found is None and config.train.branch_from:
                branch = resume.branch_point(config.train.branch_from)
            if wanted == "auto" and (before := found or branch):
                wanted = before.state["precision"]
            watch.tick(0, "start")
            precision = choose_precision(wanted, rank.device)
            with explained(run.folder, rank.rank):
                engine = build_engine(config, mesh, rank.device, precision)
            trainer = Trainer(config, run, engine, corpora, precision, screen, watch, nodes)
            trainer.given, trainer.launcher = given, rank.launcher
            if flops_per_token and run.is_main:
                possible = peak(rank.device, PRECISIONS[precision].computed)
                trainer.utilization = Utilization(*flops_per_token(config), possible, rank.world_size)
            watch.tick(0, "start")
            with explained(run.folder, rank.rank):
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
        watch: Watch,
        nodes: Nodes | None = None,
    ) -> None:
        self.config, self.run, self.engine, self.corpora = config, run, engine, corpora
        self.screen, self.watch = screen, watch
        self.given = config
        """The config before its layout was fitted to the processes that are there: a later start may have all again."""
        self.utilization: Utilization | None = None
        self.launcher = "none"
        self.branched = False
        self.state = RunState(config, run, engine, corpora, precision, nodes)
        watch.stands_in = lambda: self.state.saver.thread

    def restore(self, found: resume.ResumePoint | None, branch: resume.ResumePoint | None = None) -> None:
        """Go to where the newest checkpoint is, or to the start; leave the run's description on disk.

        branch: another run's checkpoint to start from.
        """
        config = self.config
        if config.resilience.preflight:
            for line in preflight(config, self.run, self.engine, self.state.nodes):
                self._event("slow", line)
        if found:
            said = self.state.pick_up(found)
            self._event(
                "resumed", "; ".join([f"from {found.path.name}", *said, *layout_changes(self.given, config)])
            )
        else:
            self.run.decisions.forget()
            self.state.forget_after(-1)
            begins = f"seed {config.train.seed}"
            if branch:
                self.branched = True
                begins = "; ".join(
                    [f"from {config.train.branch_from}", *self.state.pick_up(branch, own=False)]
                )
            elif config.train.init_from:
                takeover = load_weights(self.engine, config.train.init_from, config.train.init_only)
                if not config.train.init_only:
                    self.state.origin = origin_of(takeover.source, self.corpora.tokenizer_hash)
                begins = f"with {takeover}"
                for line in takeover.lines() if takeover.is_partial else ():
                    log.info("%s", line)
            self._event("started", "; ".join([begins, *layout_changes(self.given, config)]))
        facts = started(self.launcher)
        if self.run.is_main:
            facts |= {"peak": str(self.utilization.peak)} if self.utilization else {}
            self.run.describe(self.given, self.engine.layout.table, facts)
            checkpoint.clean(self.run.checkpoints)
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
        for note in self.corpora.notes:
            log.info("%s", note)

    def run_steps(self, signals: StopSignals) -> int:
        """While tokens are due: step, log, evaluate, save; stop if asked."""
        stop, _ = signals.agreed()  # during the start: there is nothing to save yet
        with StepProfile(self.config.log.profile, self.run) as profile, self.state.saver:
            while self.state.step < self.config.train.steps and not stop:
                stop = self._stretch(signals, profile)
        if self.state.step < self.config.train.steps:
            self._event(
                "stopped", f"by {stop} after step {self.state.step}: the same command goes on from there"
            )
            return REQUEUE
        self._event("finished", f"step {self.state.step}, {self.state.tokens:,} tokens")
        return DONE

    def _stretch(self, signals: StopSignals, profile: StepProfile) -> str | None:
        """Steps on data without a gap: to the end, to a signal (returned), or to a rollback or what one skips."""
        config, at, stop = self.config, self.state, None
        with self.state.loader() as loader, self._metrics() or nullcontext() as metrics:
            while at.step < config.train.steps and not stop:
                profile.before(at.step + 1)
                record = self._one_step(loader)
                self.run.check_place()
                if "skipped" not in record and at.rolls_back_after_spike(record["loss"], self._event):
                    break
                if self._due(config.evaluate.every):
                    record["evaluation"] = self._evaluate()
                if metrics:
                    metrics.write(record)
                self.screen.step(record, self._due(config.log.every))
                stop, saving = signals.agreed(at.saver.running is not None)
                if not saving:
                    at.saver.finish()  # on all ranks at the same step, so that all end with its error
                shared, local = stop or self._due(config.checkpoint.every), config.checkpoint.local_every
                if shared or (local and at.step % local == 0):
                    self.watch.tick(at.step, "save")
                    if metrics:
                        metrics.sync()
                    at.save(loader, on_nodes=not shared)
                if at.skips_data():
                    break
        return stop

    def _one_step(self, loader: Loader) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics."""
        config, at, start, waited = self.config, self.state, time.perf_counter(), loader.waited
        self.watch.tick(at.step, "step")
        checks, objective = config.resilience, self.corpora.objective
        looks = config.log.norms_every > 0 and (at.step + 1) % config.log.norms_every == 0
        stats = forward_backward(
            self.engine,
            next(loader),
            objective,
            at.step + 1,
            replay_every=checks.replay_every,
            watch=looks,
        )
        at.step, at.position = at.step + 1, loader.position
        norms = self.engine.layer_statistics() if looks else None
        lr = config.optimizer.lr * factor(config.schedule, at.step, config.train.steps)
        at.saver.settle()  # the forward and backward pass changed nothing of what is being saved
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
            **(self.utilization.of(loader.step_tokens / seconds) if self.utilization else {}),
            "data_wait_seconds": loader.waited - waited,
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
        facts = RunFacts(
            self.run.folder,
            self.state.step,
            self.config.model_dump(mode="json"),
            self.config.log.wandb_project,
            self.branched,
        )
        return MetricsLog(facts, self.config.log.sinks)

    def _due(self, every: int) -> bool:
        """Every so many steps, and at the last."""
        return self.state.step == self.config.train.steps or (every > 0 and self.state.step % every == 0)

    def _event(self, event: str, detail: str) -> None:
        log.info("%s: %s", event, detail)
        self.run.event(event, detail, self.state.step)
