"""Where a run is: step, tokens and place in the data; saved with the engine's state, and gone back to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.nodes import NodeTopology, fetch_missing_files, remove_local_after
from megatfm.config import Config
from megatfm.data import DataLoader
from megatfm.engines.interface import Engine
from megatfm.ranks import all_gather, run_on_rank_0_raising
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
        nodes: NodeTopology | None = None,
    ) -> None:
        self.config, self.run, self.engine, self.corpora = config, run, engine, corpora
        self.precision, self.machines = precision, machine.gather_hardware(engine.device)
        kept = config.checkpoint
        self.saver = checkpoint.Saver(
            run.checkpoints,
            mode=kept.mode,
            keep=kept.keep,
            keep_every=kept.keep_every,
            read_back=kept.verify_after_write,
            local_dir=nodes.folder if nodes else None,
        )
        self.nodes = nodes
        generators.seed_all(config.train.seed, run.rank)
        self.loss_guard = LossGuard(config.resilience, config.optimizer.max_grad_norm, run.decisions)
        self.step, self.tokens, self.position = 0, 0, 0
        self.origin: JsonValue = None

    def loader(self) -> DataLoader:
        """This rank's batches from here on."""
        mesh = self.engine.mesh
        return DataLoader(
            self.corpora.train,
            global_batch=self.corpora.batch_schedule,
            micro_batch=self.config.train.micro_batch,
            data_rank=mesh.data_rank,
            data_ranks=mesh.data_ranks,
            position=self.position,
            step=self.step,
            workers=self.config.data.workers,
            readers=mesh.row_readers,
        )

    def resume_from(self, found: resume.ResumePoint, *, own: bool = True) -> list[str]:
        """Go on from a checkpoint of this run, or (not `own`) of another; returns what is to be said about that."""
        with self.loader() as loader:
            facts = self._run_state_dict(loader)
        unfit = (
            "" if facts["config"]["model"] == found.state["config"]["model"] else self._shape_mismatch(found)
        )
        allowed = resume.check_compatible(found, facts, list(self.config.resume.allow), unfit, own=own)
        if own:
            self.run.decisions.read()
            if resume.settings_of_skips_changed(allowed) and (
                steps := self.run.decisions.retry_after(found.step)
            ):
                allowed.append(f"steps that were skipped are tried again: {', '.join(map(str, steps))}")
        self.load_checkpoint(found)
        if not own:
            self.saver.verified = None
        return [*allowed, *resume.hardware_changes(found, self.machines)]

    def load_checkpoint(self, found: resume.ResumePoint) -> None:
        """Load a checkpoint of this run. Where it was decided to skip data after it, that is skipped again."""
        self.remove_local_checkpoints_after(found.step)
        names = self._stored_tensors(found)
        stored = self.engine.empty_state_dict(names)
        rank, device = self.run.rank, self.engine.device
        rng_state = generators.empty_rng_state_dict(names, rank, dist.get_world_size(), device)
        wanted = {**stored, **rng_state}
        if found.local and self.nodes:
            fetch_missing_files(
                self.nodes,
                found.local,
                {name: checkpoint.ShardedTensor.from_tensor(box) for name, box in wanted.items()},
            )
        checkpoint.load(found.path, wanted)
        self.engine.load_state_dict(stored)
        generators.load_rng_state_dict(rng_state, rank, device)
        self.saver.verified = found.path if found.local is None else None
        self.step, self.tokens = found.step, int(found.state["tokens"])
        self.position = self.run.decisions.data_resume_positions.get(
            self.step, int(found.state["data"]["position"])
        )
        self.loss_guard.load(found.state.get("trouble", {}))
        self.origin = found.state.get("origin")

    def _shape_mismatch(self, found: resume.ResumePoint) -> str:
        """What of the weights doesn't fit into a model that was changed. A collective."""
        held = {**self.engine.layout, **self.engine.layout.state}
        mine = {name: tuple(placement.shape) for name, placement in held.items()}
        stored = {
            name.removeprefix("model."): shape
            for name, (_, shape) in self._stored_tensors(found).items()
            if name.startswith("model.")
        }
        return resume.first_shape_mismatch(
            stored, {name: shape for each in all_gather(mine) for name, shape in each.items()}
        )

    def _stored_tensors(self, found: resume.ResumePoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What a checkpoint holds. A collective: rank 0 tells the others, whose machines may see it later."""
        if found.local:
            return found.local.metadata(found.path).names()
        return run_on_rank_0_raising(lambda: checkpoint.names(found.path))

    def apply_data_skip(self) -> bool:
        """Whether it was decided before that the data goes on elsewhere after this step; then it does."""
        if self.step not in self.run.decisions.data_resume_positions:
            return False
        self.position = self.run.decisions.data_resume_positions[self.step]
        return True

    def roll_back_after_spike(self, loss: float, event: Callable[[str, str], None]) -> bool:
        """Whether the loss spiked and the run has gone back to a checkpoint, to go on after the data since then."""
        score = self.loss_guard.observe(loss)
        if score is None:
            return False
        said = f"loss {loss:.4g} is {score:.0f} deviations above the median of the last steps"
        self.saver.wait_for_save()
        found = (
            resume.find_resume_point(self.run.checkpoints)
            if self.config.resilience.spike == "rollback"
            else None
        )
        if found is None:
            event("spike", said)
            return False
        self.loss_guard.record_rollback(self.step, found.step, self.position)
        event("rolled back", f"{said}: from {found.path.name} on, without the data since then")
        self.load_checkpoint(found)
        return True

    def remove_local_checkpoints_after(self, step: int) -> None:
        """What the nodes hold of later steps is of a future that the run has left. A collective."""
        if self.nodes:
            remove_local_after(self.nodes, step)

    def save(self, loader: DataLoader, local: bool = False) -> None:
        """Write a checkpoint, or begin to: nothing of it may change before `saver.settle`. A collective."""
        rng_state = generators.rng_state_dict(self.run.rank, self.engine.device)
        tensors = {**self.engine.state_dict(), **rng_state}
        self.saver.save(self.step, tensors, self._run_state_dict(loader), wait_for_staging=False, local=local)

    def _run_state_dict(self, loader: DataLoader) -> dict[str, Any]:
        return resume.run_state(
            self.config,
            step=self.step,
            tokens=self.tokens,
            precision=self.precision,
            tokenizer=self.corpora.tokenizer_hash,
            data=loader.state_dict(),
            loss_guard=self.loss_guard.state(),
            machines=self.machines,
            origin=self.origin,
        )
