"""Asynchronous saves: a background thread copies the state, helped by the training thread, then writes and commits.

The background threads of the ranks communicate over a separate process group, so that their collectives never mix with
those of training.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from megatfm import object_collectives
from megatfm.checkpoint.directory import purge_old_checkpoints
from megatfm.checkpoint.local import NodeTopology, save_local
from megatfm.checkpoint.metadata import check_json_round_trip
from megatfm.checkpoint.planner import WriteItem, WritePlan, plan_save
from megatfm.checkpoint.reader import to_sharded_tensors
from megatfm.checkpoint.sharded_tensor import ShardedTensor
from megatfm.checkpoint.staging import Staging
from megatfm.checkpoint.writer import write_checkpoint
from megatfm.errors import MegatfmError, UsageError

log = logging.getLogger("megatfm")

SAVE_TIMEOUT = timedelta(hours=2)
"""Time that ranks wait for the slowest one's files."""
STAGING_NICENESS = 19
"""Niceness of the saving and hashing threads, so that they only use cores that training leaves idle."""
STAGING_POLL_SECONDS = 0.001
"""Interval at which the waiting training thread checks for chunks to copy."""
ABORT_WAIT_SECONDS = 30.0
"""Time to wait for a running save after an error elsewhere."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, ShardedTensor | Tensor],
    state: Mapping[str, JsonValue],
    *,
    keep: int | None = None,
) -> Path:
    """Write the checkpoint `folder/step-00000100`, and return its path once it is durable. A collective.

    tensors: names and shards may differ between ranks; together they must make up whole tensors. A plain tensor is a
    replica: all ranks that pass it must pass the same values. folder, step, state, keep: rank 0's count. keep: only the
    newest `keep` intact checkpoints stay, this one included; None: all. If the step was saved before, equal content
    returns that checkpoint, and other content is an error.

    Raises MegatfmError on every rank if anything fails on any; then no trace of this save is left, and older
    checkpoints are unchanged.
    """
    check_keep(keep)
    action = f"checkpoint of step {step} not saved"
    shards, plain = object_collectives.run_on_all_ranks(
        action, lambda: (to_sharded_tensors(tensors), check_json_round_trip(state))
    )
    plan = plan_save(action, shards)
    final = write_checkpoint(folder, step, plain, plan, lambda: plan.view_pieces(shards))
    if keep is not None and object_collectives.rank() == 0:
        _remove_old_checkpoints(final, keep)
    return final


def _remove_old_checkpoints(newest: Path, keep: int, **options: Any) -> None:
    """Apply retention, on rank 0. A failure is only logged: the new checkpoint is valid, and other ranks continue."""
    try:
        purge_old_checkpoints(newest, keep, **options)
    except MegatfmError as error:
        log.warning("old checkpoints could not be removed: %s", error)


def check_keep(keep: int | None) -> None:
    """Raise UsageError if no checkpoint would be kept."""
    if keep is not None and keep < 1:
        raise UsageError(f"keep = {keep}: at least one checkpoint must be kept, so 1 or more")


class Saver:
    """Writes a run's checkpoints, one at a time. Constructor, `save`, `wait_for_save` and `__exit__` are collectives.

    mode: "async" returns from `save` once the state is copied, "sync" once it is on disk. keep, keep_every: see
    `CheckpointConfig`, as verify_after_write. local_dir: this node's folder, for local saves.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: Literal["async", "sync"] = "async",
        keep: int | None = None,
        keep_every: int = 0,
        verify_after_write: bool = False,
        local_dir: Path | None = None,
    ) -> None:
        check_keep(keep)
        self.folder, self.mode = folder, mode
        self.keep, self.keep_every, self.verify_after_write = keep, keep_every, verify_after_write
        self.verified: Path | None = None
        """The newest checkpoint that was verified after it was written; retention keeps it."""
        self._pinned: Path | None = None
        self._group = (
            dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if object_collectives.is_distributed() else None
        )
        self.topology = NodeTopology.discover(local_dir, self._group) if local_dir else None
        self._staging = Staging()
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._step, self._is_local = 0, False
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._planned_layout: Mapping[str, object] = {}
        self._write_plan: WritePlan | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, ShardedTensor | Tensor],
        state: Mapping[str, JsonValue],
        *,
        wait_for_staging: bool = True,
        local: bool = False,
        pinned: Path | None = None,
    ) -> None:
        """Save `tensors` (see the function `save`) and rank 0's `state` as they are now.

        Waits for a running save first. wait_for_staging: return only once the tensors may change; otherwise call
        `wait_for_staging` before changing them. local: save to the node-local folders instead of the shared one.
        pinned: a checkpoint, maybe this one, that retention keeps once this one is committed.

        Raises MegatfmError on every rank if the previous save failed, or this one before its background part; later
        failures are raised by `wait_for_save`.
        """
        if (running := self.step_in_progress) is not None:
            log.info("step %d  waits for the checkpoint of step %d to be written", step, running)
        self.wait_for_save()
        action = f"checkpoint of step {step} not saved"
        shards, plain = object_collectives.run_on_all_ranks(
            action, lambda: (to_sharded_tensors(tensors), check_json_round_trip(state)), self._group
        )
        plan = self._get_write_plan(action, shards)
        self._step, self._is_local, self._pinned = step, local, pinned
        self._staging.mark_ready(shard.tensor for shard in shards.values())
        if self.mode == "async":
            self._copied.clear()
            self._thread = threading.Thread(
                target=self._copy_and_write, args=(plain, plan, shards), name="megatfm-save", daemon=True
            )
            self._thread.start()
            if wait_for_staging:
                self.wait_for_staging()
        else:
            self._write(plain, plan, lambda: plan.view_pieces(shards))
            self.wait_for_save()

    def wait_for_staging(self) -> None:
        """Wait until the state is staged, so that the tensors may change; helps with the copy. Not a collective.

        GPU tensors may be modified by kernels that this thread launches afterwards: its stream waits for the copies.
        """
        while not self._copied.is_set():
            self._staging.assist()
            self._copied.wait(STAGING_POLL_SECONDS)
        self._staging.unblock_training()

    @property
    def step_in_progress(self) -> int | None:
        """Step of the running save; None if there is none."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    @property
    def thread_id(self) -> int | None:
        """Thread id of the running save; None if there is none."""
        return self._thread.ident if self._thread is not None else None

    def wait_for_save(self) -> Path | None:
        """Wait for the running save and return its path (None: no save). Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        path, error, self._path, self._error = self._path, self._error, None, None
        if error is not None:
            raise error
        if path is not None:
            log.info("step %d  saved %s%s", self._step, path.name, " on the nodes" if self._is_local else "")
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the running save. After an error, wait only briefly, and only log a failure of the save."""
        if error is None:
            self.wait_for_save()
        elif self._thread is not None:
            self._thread.join(ABORT_WAIT_SECONDS)
            if self._thread.is_alive():
                log.warning("the checkpoint of step %d was abandoned: it was not written in time", self._step)
                return
            try:
                self.wait_for_save()
            except MegatfmError as second:
                log.warning("%s", second)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _copy_and_write(
        self, state: dict[str, JsonValue], plan: WritePlan, shards: Mapping[str, ShardedTensor]
    ) -> None:
        failure: Exception | None = None
        with contextlib.suppress(OSError):  # on Linux each thread has its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STAGING_NICENESS)
        try:
            copies = self._staging.copy(plan.view_pieces(shards))
        except Exception as error:
            failure = error
        finally:
            self._copied.set()

        def staged_pieces() -> Mapping[WriteItem, Tensor]:
            if failure is not None:  # raised inside the collective, so that all ranks learn of it
                raise failure
            self._staging.synchronize()
            return copies

        self._write(state, plan, staged_pieces)

    def _write(
        self, state: dict[str, JsonValue], plan: WritePlan, pieces: Callable[[], Mapping[WriteItem, Tensor]]
    ) -> None:
        """Write, commit and apply retention. Stores an error for `wait_for_save`."""
        start = time.perf_counter()
        try:
            if self._is_local:
                assert self.topology is not None
                self._path = save_local(self.topology, self._step, state, plan, pieces)
                return
            path = write_checkpoint(
                self.folder,
                self._step,
                state,
                plan,
                pieces,
                verify_after_write=self.verify_after_write,
                group=self._group,
            )
            log.debug("%s was written in %.2f s", path, time.perf_counter() - start)
            if self.verify_after_write:
                self.verified = path
            if self.keep is not None and object_collectives.rank(self._group) == 0:
                _remove_old_checkpoints(
                    path, self.keep, every=self.keep_every, verified=self.verified, pinned=self._pinned
                )
            self._path = path
        except BaseException as error:
            self._error = error

    def _get_write_plan(self, action: str, shards: Mapping[str, ShardedTensor]) -> WritePlan:
        """Return this rank's write plan, cached until the shards of some rank change."""
        layout = {
            name: (b.tensor.dtype, b.global_shape, [(p.offsets, p.tensor.shape) for p in b.blocks])
            for name, b in shards.items()
        }
        if self._write_plan is None or object_collectives.any_rank(action, layout != self._planned_layout, self._group):
            self._write_plan = None
            self._write_plan = plan_save(action, shards, self._group)
            self._planned_layout = layout
        return self._write_plan
