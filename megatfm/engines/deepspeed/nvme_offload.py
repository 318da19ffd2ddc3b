"""DeepSpeed's offload to files ("nvme"): the directory, reads and writes, swapped groups, and buffers."""

import fcntl
import math
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import IO, Any

import torch
from torch import Tensor, nn

from megatfm.config.deepspeed import NVME_UNSHARDED_ERROR, NVME_UNSHARDED_HINT
from megatfm.engines.deepspeed.internals import get_min_swapped_bytes
from megatfm.engines.interface import PRECISIONS, EngineSetup
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.layout import iter_blocks

MARKER_FILENAME = "megatfm-offload.json"
"""Name of the file that marks a folder as megatfm's; it stays locked as long as the engine lives."""
MARKER_CONTENT = b'{"made by": "megatfm, for what DeepSpeed offloads: removed with its run"}\n'
STEP_BUFFERS = 4
"""Buffers of an optimizer step: a group's weights and gradients, and up to two tensors of optimizer state."""


class OffloadDirectory:
    """A new folder in `path` for the files of one engine, removed with it.

    DeepSpeed names files by rank only, and removes earlier files of that name: two runs, or two engines of a process,
    would overwrite each other's. All folders lie in a hidden one for each user, which no other user may enter:

        nvme_path/.megatfm-offload-UID/lock
        nvme_path/.megatfm-offload-UID/HOST-xxxxxxxx/megatfm-offload.json   locked as long as the engine lives

    Raises UsageError if `path` is no folder or can't be written.
    """

    def __init__(self, path: Path) -> None:
        way_out = "name a folder on a local disk in deepspeed.nvme_path, or set deepspeed.offload_… = 'cpu'"
        if not path.is_dir():
            raise UsageError(f"deepspeed.nvme_path = {str(path)!r} is no folder of this machine: make it, or {way_out}")
        try:
            parent = _make_user_folder(path)
            with (parent / "lock").open("ab") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_EX)
                host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
                _remove_stale(parent, host)
                self.path = Path(tempfile.mkdtemp(prefix=f"{host}-", dir=parent))
                self._lock = _mark(self.path)
        except OSError as error:
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} can't be written ({error.strerror}): {way_out}"
            ) from None

    def remove(self) -> None:
        """Remove the folder, once no engine needs it."""
        rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _make_user_folder(path: Path) -> Path:
    """Return this user's folder of offloaded files, and create it if needed. Raises OSError."""
    parent = path / f".megatfm-offload-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(0, f"{parent} is another user's, or no folder: remove it")
    return parent


def _mark(folder: Path) -> IO[bytes]:
    """Mark a new folder as megatfm's and lock the marker, or remove the folder. Raises OSError."""
    try:
        (folder / MARKER_FILENAME).write_bytes(MARKER_CONTENT)
        return _lock_marker(folder)
    except OSError:
        rmtree(folder, ignore_errors=True)  # without its marker's content, no later run would
        raise


def _lock_marker(folder: Path) -> IO[bytes]:
    """Lock the marker file of a folder until the returned file is closed, or the process ends. Raises OSError."""
    file = os.fdopen(os.open(folder / MARKER_FILENAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _remove_stale(parent: Path, host: str) -> None:
    """Remove folders that killed processes of this host left: a resumed run reads its checkpoint.

    Folders of other hosts stay, since not every filesystem's locks work across machines.
    """
    for folder in parent.iterdir():
        if not re.fullmatch(rf"{re.escape(host)}-[a-z0-9_]{{8}}", folder.name) or folder.is_symlink():
            continue
        try:
            with _lock_marker(folder) as marker:
                if marker.read(len(MARKER_CONTENT) + 1) == MARKER_CONTENT:
                    rmtree(folder, ignore_errors=True)
        except OSError:  # locked by a living engine, or another user's
            continue


class SyncIOHandle:
    """Reads and writes files in place of DeepSpeed's `aio_handle` (operator `async_io`); ignores its tuning options.

    DeepSpeed's operator needs a compiler and libaio, and ignores the result of a read or write: after a failure, such
    as a direct read to an unaligned address, training continues with the old contents. System calls are used here
    instead: they raise errors, and go through the same cache as `mmap`. They block, but without prefetching DeepSpeed
    waits for each anyway.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pending = 0
        self._buffers: dict[int, Tensor] = {}

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Fill a buffer from byte `offset` of a file on; returns 0. Raises MegatfmError if that fails."""
        return self._transfer(os.preadv, os.O_RDONLY, buffer, path, offset)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Write a buffer to a file from byte `offset` on; returns 0. Raises MegatfmError if that fails."""
        return self._transfer(os.pwritev, os.O_WRONLY | os.O_CREAT, buffer, path, offset)

    def wait(self) -> int:
        """Return the number of reads and writes since the last call."""
        n_pending, self._pending = self._pending, 0
        return n_pending

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        """Return a buffer of `count` elements, pinned if there are GPUs."""
        buffer = torch.empty(count, dtype=like.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Free a buffer."""
        return self._buffers.pop(buffer.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a buffer of this handle."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _transfer(self, call: Any, flags: int, buffer: Tensor, path: str, offset: int) -> int:
        remaining = buffer.detach().view(torch.uint8).numpy().data
        try:
            file = os.open(path, flags, 0o600)
            try:
                while remaining:
                    if not (n_bytes := call(file, [remaining], offset)):
                        raise OSError(0, f"it ends {len(remaining):,} bytes early")
                    remaining, offset = remaining[n_bytes:], offset + n_bytes
            finally:
                os.close(file)
        except OSError as error:
            raise MegatfmError(
                f"{path}, a file of state that DeepSpeed offloads to 'nvme': {error.strerror}: make room there, "
                "or name another disk in deepspeed.nvme_path, and resume"
            ) from error
        self._pending += 1
        return 0


def add_buffers(derived: dict[str, Any], setup: EngineSetup) -> None:
    """Set number and size of DeepSpeed's buffers for files to at least what can be in use at once.

    The user's JSON may set more; with less, DeepSpeed fails during a step. Raises UsageError if a weight in files is
    not sharded.
    """
    zero = derived["zero_optimization"]
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        offload = zero["offload_optimizer"]
        offload["buffer_count"] = max(STEP_BUFFERS, offload.get("buffer_count", 0))
    if zero.get("offload_param", {}).get("device") == "nvme":
        offload, sizes = zero["offload_param"], _shard_sizes(setup)
        smallest = max(get_min_swapped_bytes(), derived.get("aio", {}).get("block_size", 2**20))
        itemsize = PRECISIONS[setup.precision].compute_dtype.itemsize
        in_files = {name for name, size in sizes.items() if size * itemsize >= smallest}
        if any(math.prod(map(setup.mesh.size, setup.layout[name].data_axes.all)) == 1 for name in in_files):
            raise UsageError(f"{NVME_UNSHARDED_ERROR}: {NVME_UNSHARDED_HINT}")
        offload["buffer_count"] = max(count_buffers_in_use(setup.model, in_files), offload.get("buffer_count", 0))
        offload["buffer_size"] = max(max(sizes.values()), offload.get("buffer_size", 0))


def _shard_sizes(setup: EngineSetup) -> dict[str, int]:
    """Return the elements of each weight on this rank, padding included."""
    return {
        name: -(-math.prod(layout.region[1]) // math.prod(map(setup.mesh.size, layout.data_axes.all)))
        for name, layout in setup.layout.items()
    }


def count_buffers_in_use(model: nn.Module, in_files: set[str]) -> int:
    """Return the largest number of weights in files that can be in buffers at once.

    These are the weights of one block, of the next one while the last gradients of the first are computed, and all
    outside of blocks. If a weight is frozen, it may be all: DeepSpeed keeps weights of modules whose inputs need no
    gradient until the backward pass ends.
    """
    parameters = dict(model.named_parameters())
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return max(1, len(in_files))
    swapped = {id(parameters[name]) for name in in_files}
    in_blocks = [swapped & {id(p) for p in block.parameters()} for block in iter_blocks(model)]
    outside = swapped.difference(*in_blocks)
    return max(1, len(outside) + sum(sorted(map(len, in_blocks))[-2:]))
