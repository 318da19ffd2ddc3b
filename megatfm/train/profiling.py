"""Diagnosis of memory and time: out-of-memory errors with a snapshot, profiles of chosen steps, and NCCL's flight
recorder for hangs.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import psutil
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatfm.errors import MegatfmError
from megatfm.files import temporary_path
from megatfm.tracking.metrics import SNAPSHOT_DIR
from megatfm.tracking.run_directory import RunDirectory

log = logging.getLogger("megatfm")


def should_record_allocations(folder: Path, requested: bool) -> bool:
    """Return whether to record allocations: on request, and after the run has run out of memory."""
    return requested or (folder / SNAPSHOT_DIR).is_dir()


def record_allocations(device: torch.device) -> None:
    """On a GPU, have the allocator remember where in Python each block came from, for the snapshot.

    This takes 2 µs an allocation (docstring of torch.cuda.memory._record_memory_history), and memory for the last
    100,000 of them.
    """
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")


def get_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process on the GPU, or its current memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


@contextlib.contextmanager
def explain_out_of_memory(folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a MegatfmError with advice; on a GPU, also write a memory snapshot.

    The snapshot is memory/rank-K.pickle in the run directory, for https://pytorch.org/memory_viz. It contains what
    `record_allocations` has recorded.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        requested_bytes = _parse_requested_memory(error)
        if requested_bytes is None:
            raise
        allocated_bytes = get_memory_bytes(device)
        snapshot = _write_snapshot(folder, rank) if device.type == "cuda" else ""
        raise MegatfmError(
            f"rank {rank} is out of memory: it held {allocated_bytes / 2**30:.3g} GiB{requested_bytes}{snapshot}. "
            "Lower train.micro_batch, set train.recompute = 'full', or shard the model more: a higher parallel.zero, "
            "parallel.dp_shard, parallel.tp or parallel.pp"
        ) from error


OUTSIDE_OF_TORCH = re.compile(
    r"(CUDA|HIP) error: out of memory|(Cuda|HIP) failure (\d+ )?'out of memory'|(CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED"
)
"""Errors of allocations beside torch's allocator: of CUDA itself, of NCCL and of cuBLAS."""


def _parse_requested_memory(error: BaseException) -> str | None:
    """Describe the allocation that failed; None for an error of another kind."""
    if isinstance(error, MemoryError):
        return ""
    text = str(error)
    if match := re.search(r"tried to allocate (\d+) bytes", text):  # torch's allocator of the CPU
        return f" and asked for {int(match[1]) / 2**30:.3g} GiB more"
    if isinstance(error, torch.OutOfMemoryError):
        match = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        return f" and asked for {match[1]} more" if match else ""
    if OUTSIDE_OF_TORCH.search(text):
        return " in tensors, and CUDA or one of its libraries found no memory beside them"
    return None


def _write_snapshot(folder: Path, rank: int) -> str:
    """Write the GPU's memory snapshot; return the end of the error message, which says where it is."""
    path = folder / SNAPSHOT_DIR / f"rank-{rank}.pickle"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; a memory snapshot could not be written to {path}: {error}"
    return f"; memory snapshot: {path}"


FLIGHT_RECORDER_VARS = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),  # number of recorded collectives
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "{folder}/logs/nccl-"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("", "1"),
}
"""Variable → (older name, value)."""


def start_flight_recorder(folder: Path, device: str) -> None:
    """Switch on NCCL's flight recorder of collectives, before the process group is created. Keeps existing settings.

    A rank whose collective times out leaves `logs/nccl-RANK`, a pickle for torch's flight recorder analyzer.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return
    for name, (old_name, value) in FLIGHT_RECORDER_VARS.items():
        if old_name not in os.environ:
            os.environ.setdefault(name, value.format(folder=folder))


def dump_flight_recorder(file: int, rank: int) -> None:
    """Write this rank's unfinished collectives, as JSON, to an open file. Does nothing without NCCL."""
    if not (dist.is_initialized() and dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())):
        return
    from torch._C import _distributed_c10d

    # NCCL may have its own recorder, beside the one that all back ends share.
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    dump = dump or _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    trace = dump(includeCollectives=True, onlyActive=True)
    os.write(file, f"Unfinished collectives of rank {rank}: ".encode() + trace + b"\n")


class StepProfile:
    """Context manager that records a torch profile of the steps first … end−1 of `log.profile` = "first:end".

    Writes profile/rank-K-steps-FIRST-END.json, a Chrome trace. If the steps are repeated, after a rollback or restart,
    writes another file beside it. Call `before_step(step)` before each step.
    """

    def __init__(self, steps: str | None, run: RunDirectory, device: torch.device) -> None:
        self._first, self._end = (int(step) for step in steps.split(":")) if steps else (0, 0)
        name = f"rank-{run.rank}-steps-{self._first}-{self._end}"
        self._path = run.folder / "profile" / f"{name}.json"
        self._device = device
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def before_step(self, step: int) -> None:
        """Start the recording before the first step of the range, and end it after the last."""
        if self._first <= step < self._end and self._profile is None:
            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)
            self._profile.start()
        elif step >= self._end:
            self._finish()

    def __exit__(self, *_: object) -> None:
        self._finish()

    def _finish(self) -> None:
        """End the recording, and write it; a failure is only logged, as the run doesn't need the profile."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        path, suffix = self._path, 1
        while path.exists():
            suffix += 1
            path = self._path.with_stem(f"{self._path.stem}-{suffix}")
        temporary = temporary_path(path)
        try:
            path.parent.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            log.warning("log.profile: can't write %s: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
