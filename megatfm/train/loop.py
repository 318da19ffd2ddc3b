"""The story of a run, from the config to the last checkpoint."""

import logging
import time
from typing import Any

import torch

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.data import Loader, check_batch
from megatfm.engines import NativeEngine, StepStats
from megatfm.errors import DONE, REQUEUE, MegatfmError
from megatfm.parallel import bootstrap
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.train import resume
from megatfm.train.build import build_engine, choose_precision
from megatfm.train.console import RunLog
from megatfm.train.corpora import Corpora, open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate, summary
from megatfm.train.init import load_weights
from megatfm.train.memory import keep_freed_memory, memory_bytes
from megatfm.train.metrics import MetricsLog, RunFacts, log_event
from megatfm.train.profile import StepProfile
from megatfm.train.run import Run, run_folder
from megatfm.train.schedules import factor
from megatfm.train.signals import StopSignals

log = logging.getLogger("megatfm")


def train(config: Config) -> int:
    """Train or resume the run of a config; called on every rank. Returns the exit code."""
    import_plugins(config.plugins)
    config, tokenizer = open_tokenizer(config)
    with bootstrap.joined(device=config.train.device) as rank:
        if rank.device.type == "cpu":
            keep_freed_memory()
        mesh = build_mesh(config.parallel, rank.world_size, rank.device.type)
        check_batch(config.train.global_batch, config.train.micro_batch, mesh.data_ranks)
        corpora = open_corpora(config, tokenizer)
        with Run(run_folder(config), rank.rank) as run, RunLog(run, config.train.steps) as screen:
            found = resume.find(run.checkpoints, rank.rank)
            wanted = config.train.precision
            if found and wanted == "auto":
                wanted = found.state["precision"]
            precision = choose_precision(wanted, rank.device)
            engine = build_engine(config, mesh, rank.device, precision)
            trainer = Trainer(config, run, engine, corpora, precision, screen)
            trainer.restore(found)
            return trainer.run_steps()


class Trainer:
    """One process's share of a run."""

    def __init__(
        self, config: Config, run: Run, engine: NativeEngine, corpora: Corpora, precision: str, screen: RunLog
    ) -> None:
        self.config, self.run, self.engine, self.corpora = config, run, engine, corpora
        self.precision, self.screen = precision, screen
        self.byte_lengths = corpora.tokenizer.byte_lengths()
        self.step, self.tokens, self.position = 0, 0, 0

    def restore(self, found: resume.Found | None) -> None:
        """Go to where the newest checkpoint is, or to the start; leave the run's description on disk."""
        config = self.config
        if found:
            with self._loader() as loader:
                allowed = resume.check(found, self._state(loader), list(config.resume.allow))
            stored = self.engine.empty_state_dict(checkpoint.names(found.path))
            checkpoint.load(found.path, stored)
            self.engine.load_state_dict(stored)
            self.step = found.step
            self.tokens, self.position = int(found.state["tokens"]), int(found.state["data"]["position"])
            self._event("resumed", "; ".join([f"from {found.path.name}", *allowed]))
        elif config.train.init_from:
            self._event("started", f"with the weights of {load_weights(self.engine, config.train.init_from)}")
        else:
            self._event("started", f"seed {config.train.seed}")
        if self.run.is_main:
            self.run.describe(config, self.engine.layout.table)
            checkpoint.clean(self.run.checkpoints)
        log.info(
            "%s: %s parameters, %s, %s, step %d of %d",
            self.run.folder,
            f"{sum(torch.Size(p.shape).numel() for p in self.engine.layout.values()):,}",
            self.engine.mesh.describe(),
            self.precision,
            self.step,
            config.train.steps,
        )

        for note in self.corpora.notes:
            log.info("%s", note)

    def run_steps(self) -> int:
        """While tokens are due: step, log, evaluate, save; stop if asked."""
        config, stop = self.config, None
        metrics = self._metrics()
        with (
            self._loader() as loader,
            StopSignals(self.engine.device) as signals,
            StepProfile(config.log.profile, self.run) as profile,
        ):
            while self.step < config.train.steps and not stop:
                profile.before(self.step + 1)
                record = self._one_step(loader)
                if self._due(config.evaluate.every):
                    record["evaluation"] = self._evaluate()
                if metrics:
                    metrics.write(record)
                self.screen.step(record, self._due(config.log.every))
                stop = signals.agreed()
                if stop or self._due(config.checkpoint.every):
                    self._save(loader, metrics)
        if metrics:
            metrics.close()
        if self.step < config.train.steps:
            self._event("stopped", f"by {stop} after step {self.step}: the same command goes on from there")
            return REQUEUE
        self._event("finished", f"step {self.step}, {self.tokens:,} tokens")
        return DONE

    def _one_step(self, loader: Loader) -> dict[str, Any]:
        """One optimizer step; returns its line of metrics."""
        config, start, waited = self.config, time.perf_counter(), loader.waited
        stats: StepStats = self.engine.forward_backward(next(loader), self.corpora.objective)
        self.step += 1
        lr = config.optimizer.lr * factor(config.schedule, self.step, config.train.steps)
        grad_norm = self.engine.step(lr, config.optimizer.clip)
        if not torch.isfinite(torch.tensor([grad_norm, stats.loss])).all():
            raise MegatfmError(
                f"step {self.step}: loss {stats.loss}, gradient norm {grad_norm}: not finite, so the weights were not "
                f"changed. Resume from {self.run.checkpoints} with a lower optimizer.lr or another train.seed"
            )
        self.tokens += config.train.global_batch * config.data.sequence_length
        seconds = time.perf_counter() - start
        return {
            "step": self.step,
            "tokens": self.tokens,
            "loss": stats.loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": config.train.global_batch * config.data.sequence_length / seconds,
            "data_wait_seconds": loader.waited - waited,
            "step_seconds": seconds,
            "memory_bytes": memory_bytes(self.engine.device),
            "time": time.time(),
        }

    def _evaluate(self) -> dict[str, Any]:
        results = {}
        for name, rows in self.corpora.validation.items():
            results[name] = evaluate(
                self.engine,
                rows,
                self.corpora.objective,
                self.byte_lengths,
                micro_batch=self.config.train.micro_batch,
                max_rows=self.config.evaluate.max_rows,
            )
            log.info("step %d  %s: %s", self.step, name, summary(results[name]))
        return results

    def _save(self, loader: Loader, metrics: MetricsLog | None) -> None:
        if metrics:
            metrics.sync()
        path = checkpoint.save(
            self.run.checkpoints,
            self.step,
            self.engine.state_dict(),
            self._state(loader),
            keep=self.config.checkpoint.keep,
        )
        log.info("step %d  saved %s", self.step, path.name)

    def _state(self, loader: Loader) -> dict[str, Any]:
        return resume.run_state(
            self.config,
            step=self.step,
            tokens=self.tokens,
            precision=self.precision,
            tokenizer=self.corpora.tokenizer.hash,
            data=loader.state(),
        )

    def _loader(self) -> Loader:
        mesh = self.engine.mesh
        return Loader(
            self.corpora.train,
            global_batch=self.config.train.global_batch,
            micro_batch=self.config.train.micro_batch,
            data_rank=mesh.data_rank,
            data_ranks=mesh.data_ranks,
            position=self.position,
        )

    def _metrics(self) -> MetricsLog | None:
        if not self.run.is_main:
            return None
        facts = RunFacts(
            self.run.folder, self.step, self.config.model_dump(mode="json"), self.config.log.wandb_project
        )
        return MetricsLog(facts, self.config.log.sinks)

    def _due(self, every: int) -> bool:
        """Every so many steps, and at the last."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _event(self, event: str, detail: str) -> None:
        log.info("%s: %s", event, detail)
        if self.run.is_main:
            log_event(self.run.folder, event, detail, self.step)
