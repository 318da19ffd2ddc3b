"""Where a run is: step, tokens and place in the data; saved with the engine's state, and gone back to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.nodes import Nodes, fetch, forget_nodes
from megatfm.config import Config
from megatfm.data import Loader
from megatfm.engines.interface import Engine
from megatfm.ranks import gather, run_on_rank_0
from megatfm.train import generators, resume
from megatfm.train.corpora import Corpora
from megatfm.train.guards.loss_guard import LossGuard
from megatfm.train.record import machine
from megatfm.train.record.run_directory import RunDirectory


class RunState:
    """The moving part of a run, on one rank."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        engine: Engine,
        corpora: Corpora,
        precision: str,
        nodes: Nodes | None = None,
    ) -> None:
        self.config, self.run, self.engine, self.corpora = config, run, engine, corpora
        self.precision, self.machines = precision, machine.of_all_ranks(engine.device)
        kept = config.checkpoint
        self.saver = checkpoint.Saver(
            run.checkpoints,
            mode=kept.mode,
            keep=kept.keep,
            keep_every=kept.keep_every,
            read_back=kept.read_back,
            local=nodes.folder if nodes else None,
        )
        self.nodes = nodes
        generators.seed_all(config.train.seed, run.rank)
        self.loss_guard = LossGuard(config.resilience, config.optimizer.clip, run.decisions)
        self.step, self.tokens, self.position = 0, 0, 0
        self.origin: JsonValue = None

    def loader(self) -> Loader:
        """This rank's batches from here on."""
        mesh = self.engine.mesh
        return Loader(
            self.corpora.train,
            global_batch=self.corpora.steps,
            micro_batch=self.config.train.micro_batch,
            data_rank=mesh.data_rank,
            data_ranks=mesh.data_ranks,
            position=self.position,
            step=self.step,
            workers=self.config.data.workers,
            readers=mesh.readers,
        )

    def pick_up(self, found: resume.ResumePoint, *, own: bool = True) -> list[str]:
        """Go on from a checkpoint of this run, or (not `own`) of another; returns what is to be said about that."""
        with self.loader() as loader:
            facts = self._facts(loader)
        unfit = "" if facts["config"]["model"] == found.state["config"]["model"] else self._unfit(found)
        allowed = resume.check(found, facts, list(self.config.resume.allow), unfit, own=own)
        if own:
            self.run.decisions.read()
            if resume.settings_of_skips_changed(allowed) and (
                steps := self.run.decisions.retry_after(found.step)
            ):
                allowed.append(f"steps that were skipped are tried again: {', '.join(map(str, steps))}")
        self.go_to(found)
        if not own:
            self.saver.verified = None
        return [*allowed, *resume.elsewhere(found, self.machines)]

    def go_to(self, found: resume.ResumePoint) -> None:
        """Load a checkpoint of this run. Where it was decided to skip data after it, that is skipped again."""
        self.forget_after(found.step)
        names = self._names(found)
        stored = self.engine.empty_state_dict(names)
        rank, device = self.run.rank, self.engine.device
        drawn = generators.room(names, rank, dist.get_world_size(), device)
        wanted = {**stored, **drawn}
        if found.held and self.nodes:
            fetch(self.nodes, found.held, {name: checkpoint.Box.of(box) for name, box in wanted.items()})
        checkpoint.load(found.path, wanted)
        self.engine.load_state_dict(stored)
        generators.set_state(drawn, rank, device)
        self.saver.verified = found.path if found.held is None else None
        self.step, self.tokens = found.step, int(found.state["tokens"])
        self.position = self.run.decisions.data_skips.get(self.step, int(found.state["data"]["position"]))
        self.loss_guard.load(found.state.get("trouble", {}))
        self.origin = found.state.get("origin")

    def _unfit(self, found: resume.ResumePoint) -> str:
        """What of the weights doesn't fit into a model that was changed. A collective."""
        held = {**self.engine.layout, **self.engine.layout.state}
        mine = {name: tuple(placement.shape) for name, placement in held.items()}
        stored = {
            name.removeprefix("model."): shape
            for name, (_, shape) in self._names(found).items()
            if name.startswith("model.")
        }
        return resume.does_not_fit(
            stored, {name: shape for each in gather(mine) for name, shape in each.items()}
        )

    def _names(self, found: resume.ResumePoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What a checkpoint holds. A collective: rank 0 tells the others, whose machines may see it later."""
        if found.held:
            return found.held.content(found.path).names()
        return run_on_rank_0(lambda: checkpoint.names(found.path))

    def skips_data(self) -> bool:
        """Whether it was decided before that the data goes on elsewhere after this step; then it does."""
        if self.step not in self.run.decisions.data_skips:
            return False
        self.position = self.run.decisions.data_skips[self.step]
        return True

    def rolls_back_after_spike(self, loss: float, event: Callable[[str, str], None]) -> bool:
        """Whether the loss spiked and the run has gone back to a checkpoint, to go on after the data since then."""
        score = self.loss_guard.observe(loss)
        if score is None:
            return False
        said = f"loss {loss:.4g} is {score:.0f} deviations above the median of the last steps"
        self.saver.finish()
        found = resume.find(self.run.checkpoints) if self.config.resilience.spike == "rollback" else None
        if found is None:
            event("spike", said)
            return False
        self.loss_guard.go_back(self.step, found.step, self.position)
        event("rolled back", f"{said}: from {found.path.name} on, without the data since then")
        self.go_to(found)
        return True

    def forget_after(self, step: int) -> None:
        """What the nodes hold of later steps is of a future that the run has left. A collective."""
        if self.nodes:
            forget_nodes(self.nodes, step)

    def save(self, loader: Loader, on_nodes: bool = False) -> None:
        """Write a checkpoint, or begin to: nothing of it may change before `saver.settle`. A collective."""
        drawn = generators.state(self.run.rank, self.engine.device)
        tensors = {**self.engine.state_dict(), **drawn}
        self.saver.save(self.step, tensors, self._facts(loader), copied=False, on_nodes=on_nodes)

    def _facts(self, loader: Loader) -> dict[str, Any]:
        return resume.run_state(
            self.config,
            step=self.step,
            tokens=self.tokens,
            precision=self.precision,
            tokenizer=self.corpora.tokenizer_hash,
            data=loader.state(),
            trouble=self.loss_guard.state(),
            machines=self.machines,
            origin=self.origin,
        )
