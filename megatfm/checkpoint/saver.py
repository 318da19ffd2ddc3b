"""Saves in the background: the training thread copies, another thread writes and commits.

What the background threads of the ranks agree on goes over a process group of their own, so that it never mixes
with training's collectives.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatfm import ranks
from megatfm.checkpoint import metadata
from megatfm.checkpoint.box import ShardedTensor
from megatfm.checkpoint.folder import purge_old_checkpoints
from megatfm.checkpoint.nodes import NodeTopology, save_local
from megatfm.checkpoint.share import WritePlan, plan_save
from megatfm.checkpoint.staging import Staging
from megatfm.checkpoint.store import boxes_of, check_keep
from megatfm.checkpoint.writer import write_checkpoint
from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

SAVE_TIMEOUT = timedelta(hours=2)
"""How long the other ranks wait for the slowest one's files."""
STAGING_NICENESS = 19
"""Of a thread that copies and writes, and of the one that hashes for it: they leave busy cores to training, until it
waits for them."""
STAGING_POLL_SECONDS = 0.001
"""Between looks whether there is something to help with."""
ABORT_WAIT_SECONDS = 30.0
"""After an error elsewhere: how long a save that still runs may take."""


class Saver:
    """Writes a run's checkpoints, one at a time. Making one is a collective, and so are save, finish and leaving.

    mode: "async" returns from `save` once the state is copied, "sync" once it is on the disk. keep, keep_every,
    verify_after_write: see `CheckpointConfig`. local_dir: this node's folder, for saves `on_nodes`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: Literal["async", "sync"] = "async",
        keep: int | None = None,
        keep_every: int = 0,
        read_back: bool = False,
        local_dir: Path | None = None,
    ) -> None:
        check_keep(keep)
        self.folder, self.mode = folder, mode
        self.keep, self.keep_every, self.read_back = keep, keep_every, read_back
        self.verified: Path | None = None
        """The newest checkpoint of which every byte was read and compared: retention leaves it."""
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if ranks.is_distributed() else None
        self.topology = NodeTopology.discover(local_dir, self._group) if local_dir else None
        self._staging = Staging()
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._step, self._on_nodes = 0, False
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
    ) -> None:
        """Save `tensors` (see `store.save`) and rank 0's `state` as they are now.

        Waits for a save that still runs. wait_for_staging: return only once the tensors may change; otherwise
        `settle` must be called before they do. local: to the node-local folders instead of the shared one.

        Raises MegatfmError on every rank for the failure of the save before, or of this one before it goes on in the
        background; a later one is `finish`'s to raise.
        """
        if (running := self.step_in_progress) is not None:
            log.info("step %d  waits for the checkpoint of step %d to be written", step, running)
        self.wait_for_save()
        what = f"checkpoint of step {step} not saved"
        boxes, plain = ranks.run_on_all_ranks(
            what, lambda: (boxes_of(tensors), metadata.check_json_round_trip(state)), self._group
        )
        share = self._get_write_plan(what, boxes)
        self._step, self._on_nodes = step, local
        self._staging.begin(box.tensor for box in boxes.values())
        if self.mode == "async":
            self._copied.clear()
            self._thread = threading.Thread(
                target=self._copy_and_write, args=(plain, share, boxes), name="megatfm-save", daemon=True
            )
            self._thread.start()
            if wait_for_staging:
                self.wait_for_staging()
        else:
            self._write(plain, share, lambda: share.tensors_to_write(boxes))
            self.wait_for_save()

    def wait_for_staging(self) -> None:
        """Wait until what is being saved is copied, and so may change, and help with it. Local, and short.

        What is on a GPU may be changed by what this thread asks of the GPU from then on, which waits for the copies.
        """
        while not self._copied.is_set():
            self._staging.help()
            self._copied.wait(STAGING_POLL_SECONDS)
        self._staging.release()

    @property
    def step_in_progress(self) -> int | None:
        """The step whose save still goes on in this process, if any."""
        return self._step if self._thread is not None and self._thread.is_alive() else None

    @property
    def pending(self) -> bool:
        """Whether there is something for `finish` to say."""
        return self._thread is not None

    @property
    def thread_id(self) -> int | None:
        """The thread that a running save goes on in."""
        return self._thread.ident if self._thread is not None else None

    def wait_for_save(self) -> Path | None:
        """Wait for the running save; returns its path, None where there is none. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        path, error, self._path, self._error = self._path, self._error, None, None
        if error is not None:
            raise error
        if path is not None:
            log.info("step %d  saved %s%s", self._step, path.name, " on the nodes" if self._on_nodes else "")
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish. After an error, a save that still runs gets a little time, and what becomes of it is only logged."""
        if error is None:
            self.wait_for_save()
        elif self._thread is not None:
            self._thread.join(ABORT_WAIT_SECONDS)
            if self._thread.is_alive():
                log.warning("the checkpoint of step %d is given up", self._step)
                return
            try:
                self.wait_for_save()
            except MegatfmError as second:
                log.warning("%s", second)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _copy_and_write(
        self, state: dict[str, JsonValue], share: WritePlan, boxes: Mapping[str, ShardedTensor]
    ) -> None:
        failure: Exception | None = None
        with contextlib.suppress(OSError):  # on Linux each thread has its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STAGING_NICENESS)
        try:
            copies = self._staging.copy(share.tensors_to_write(boxes))
        except Exception as error:
            failure = error
        finally:
            self._copied.set()

        def pieces() -> Mapping[MetadataIndex, Tensor]:
            if failure is not None:  # raised where all ranks hear of it
                raise failure
            self._staging.arrive()
            return copies

        self._write(state, share, pieces)

    def _write(
        self,
        state: dict[str, JsonValue],
        share: WritePlan,
        pieces: Callable[[], Mapping[MetadataIndex, Tensor]],
    ) -> None:
        """Write, commit, and remove what is too old; whatever is raised is kept for `finish`."""
        start = time.perf_counter()
        try:
            if self._on_nodes:
                assert self.topology is not None
                self._path = save_local(self.topology, self._step, state, share, pieces)
                return
            path = write_checkpoint(
                self.folder, self._step, state, share, pieces, read_back=self.read_back, group=self._group
            )
            log.debug("%s was written in %.2f s", path, time.perf_counter() - start)
            if self.read_back:
                self.verified = path
            if self.keep is not None and ranks.rank(self._group) == 0:
                try:
                    purge_old_checkpoints(path, self.keep, every=self.keep_every, verified=self.verified)
                except MegatfmError as error:  # the new one stands all the same
                    log.warning("old checkpoints stay: %s", error)
            self._path = path
        except BaseException as error:
            self._error = error

    def _get_write_plan(self, what: str, boxes: Mapping[str, ShardedTensor]) -> WritePlan:
        """What this rank writes. It is agreed on anew only when some rank holds other boxes than at the last save."""
        held = {
            name: (b.tensor.dtype, b.global_shape, [(p.offsets, p.tensor.shape) for p in b.blocks])
            for name, b in boxes.items()
        }
        if self._write_plan is None or ranks.any_rank(what, held != self._planned_layout, self._group):
            self._write_plan = None
            self._write_plan = plan_save(what, boxes, self._group)
            self._planned_layout = held
        return self._write_plan
