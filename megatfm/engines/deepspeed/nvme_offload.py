"""DeepSpeed's offload to files ("nvme"): the folder, reading and writing, groups in files, and buffers."""

import fcntl
import importlib
import math
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from megatfm.config.deepspeed import NVME_UNSHARDED_ERROR, NVME_UNSHARDED_HINT
from megatfm.engines.interface import PRECISIONS, EngineSetup
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.layout import transformer_blocks

MARK = "megatfm-offload.json"
"""The file that marks a folder as megatfm's; its lock says whether the engine lives."""
CONTENT = b'{"made by": "megatfm, for what DeepSpeed offloads: removed with its run"}\n'
BUFFERS_OF_A_STEP = 4
"""Buffers of the optimizer's step: a group's weights, gradients and, for each optimizer, up to two kinds of state."""


class OffloadDirectory:
    """A new folder in `path`, which no other engine writes to, and which is removed with its engine.

    DeepSpeed names files by a rank alone, and removes an earlier engine's files of that name: two runs, or two
    engines of one process, would write over each other's. All lie in one hidden folder for each user, which no other
    user may enter:

        nvme_path/.megatfm-offload-UID/lock
        nvme_path/.megatfm-offload-UID/HOST-xxxxxxxx/megatfm-offload.json   locked as long as the engine lives

    Raises UsageError where none can be made or used.
    """

    def __init__(self, path: Path) -> None:
        self._lock: IO[bytes] | None = None
        way_out = "name a folder on a local disk in deepspeed.nvme_path, or set deepspeed.offload_… = 'cpu'"
        if not path.is_dir():
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} is no folder of this machine: make it, or {way_out}"
            )
        try:
            parent = _folder_of_user(path)
            with (parent / "lock").open("ab") as lock_file:
                fcntl.flock(lock_file, fcntl.LOCK_EX)
                host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
                _remove_stale(parent, host)
                self.path = Path(tempfile.mkdtemp(prefix=f"{host}-", dir=parent))
                (self.path / MARK).write_bytes(CONTENT)
                self._lock = _lock_mark(self.path)
        except OSError as error:
            self.remove()
            raise UsageError(
                f"deepspeed.nvme_path = {str(path)!r} can't be written ({error.strerror}): {way_out}"
            ) from None

    def remove(self) -> None:
        """Remove the folder, once no engine needs it."""
        if self._lock:
            rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _folder_of_user(path: Path) -> Path:
    """Return this user's folder of offloaded files, and create it if needed. Raises OSError."""
    parent = path / f".megatfm-offload-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(0, f"{parent} is another user's, or no folder: remove it")
    return parent


def _lock_mark(folder: Path) -> IO[bytes]:
    """Lock the mark of a folder until it is closed, which the system does where a process dies. Raises OSError."""
    file = os.fdopen(os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _remove_stale(parent: Path, host: str) -> None:
    """Remove folders that killed processes of this host have left: a run that resumes reads its checkpoint.

    Whether a process of another host lives can't be seen here, since not every filesystem's locks cross machines.
    """
    for folder in parent.iterdir():
        if not re.fullmatch(rf"{re.escape(host)}-[a-z0-9_]{{8}}", folder.name) or folder.is_symlink():
            continue
        try:
            with _lock_mark(folder) as mark:
                if mark.read(len(CONTENT) + 1) == CONTENT:
                    rmtree(folder, ignore_errors=True)
        except OSError:  # it lives, or isn't ours
            continue


class SyncIOHandle:
    """Reads and writes files in the place of DeepSpeed's `aio_handle` (its operator `async_io`), whose tuning it
    ignores.

    That operator needs a compiler and libaio, and never looks at the result of a read or write: one that fails, as at
    an address in memory that a disk can't be read to directly, leaves what was there before, and training goes on with
    it. Here the system's calls are used, so that the file seen as memory (`mmap`) is the same to the byte, and an error
    is raised where it happens. They wait: with reading ahead turned off, DeepSpeed waits for each at once anyway.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._pending = 0
        self._buffers: dict[int, Tensor] = {}

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Fill a buffer from a file's byte `offset` on. Raises MegatfmError where it can't be filled."""
        return self._move(os.preadv, os.O_RDONLY, buffer, path, offset)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Write a buffer to a file from byte `offset` on. Raises MegatfmError where it can't be written."""
        return self._move(os.pwritev, os.O_WRONLY | os.O_CREAT, buffer, path, offset)

    def wait(self) -> int:
        """The number of reads and writes since the last call."""
        n_pending, self._pending = self._pending, 0
        return n_pending

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        """A buffer of `count` elements, pinned where there are GPUs."""
        buffer = torch.empty(count, dtype=like.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Free a buffer."""
        return self._buffers.pop(buffer.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is (part of) a buffer of this handle, which lives as long as its engine."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _move(self, call: Any, flags: int, buffer: Tensor, path: str, offset: int) -> int:
        unmoved = buffer.detach().view(torch.uint8).numpy().data
        try:
            file = os.open(path, flags, 0o600)
            try:
                while unmoved:
                    if not (n_bytes := call(file, [unmoved], offset)):
                        raise OSError(0, f"it ends {len(unmoved):,} bytes early")
                    unmoved, offset = unmoved[n_bytes:], offset + n_bytes
            finally:
                os.close(file)
        except OSError as error:
            raise MegatfmError(
                f"{path}, where DeepSpeed keeps what is offloaded to 'nvme': {error.strerror}: make room there, "
                "or name another disk in deepspeed.nvme_path, and resume"
            ) from error
        self._pending += 1
        return 0


def install_aio_handle(package: ModuleType) -> None:
    """Have DeepSpeed take `SyncIOHandle` for its operator, which it would compile."""
    kind = type(package.ops.op_builder.AsyncIOBuilder())
    kind.load = lambda self, verbose=True: SimpleNamespace(aio_handle=SyncIOHandle)


class SwappedGroups:
    """The groups of a stage 3 optimizer that are in files: their weights and optimizer state are read in for their part
    of a step and written back after it. Groups below 1 MiB a rank DeepSpeed keeps in memory.

    Between steps the files are seen as memory (`mmap`), which the system reads as it is touched, so checkpoints and
    loading don't need all of it at once. `SyncIOHandle` goes through the same cache, so it is the same bytes.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._mapped: dict[str, Tensor] = {}
        owners = optimizer.fp32_partitioned_groups_flat
        self._numbers = {
            id(owner): number
            for number, owner in enumerate(owners)
            if optimizer._swappable_optimizer_subgroup(number)
        }

    def weights(self, number: int) -> Tensor:
        """A group's weights, to be read and written between steps."""
        owner: Tensor = self._optimizer.fp32_partitioned_groups_flat[number]
        if id(owner) not in self._numbers:
            return owner
        (weights, *_) = self._info(owner).tensors
        return self._map(weights.swap_path, number)

    @contextmanager
    def swap_in(self, number: int) -> Iterator[None]:
        """Have a group's weights in memory, to read them."""
        optimizer = self._optimizer
        swapped = id(optimizer.fp32_partitioned_groups_flat[number]) in self._numbers
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if swapped:
                optimizer._release_swap_buffers(number)

    def states(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The state of a group, as it is between steps."""
        if id(owner) not in self._numbers:
            return state
        paths = {id(info.compute_tensor): info.swap_path for info in self._info(owner).tensors}
        number = self._numbers[id(owner)]
        return {
            key: self._map(paths[id(value)], number) if id(value) in paths else value
            for key, value in state.items()
        }

    def put_states(self, owner: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Write a group's state to its files; false where it has none."""
        if id(owner) not in self._numbers:
            return False
        optimizer, number, info = self._optimizer, self._numbers[id(owner)], self._info(owner)
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        optimizer.optimizer.state[owner] = {}
        optimizer._optimizer_states_and_gradient_swap_in(number)
        optimizer.optimizer.state[owner] = dict(state)
        optimizer._optimizer_states_and_gradient_swap_out(number)
        return True

    @contextmanager
    def swap_in_parameter(self, parameter: Any) -> Iterator[None]:
        """Have this rank's shard of what the model computes with in memory, to set it."""
        shard = parameter.ds_tensor
        in_file = shard.status.name == "NOT_AVAILABLE"
        if in_file:
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        try:
            yield
        finally:
            if in_file:
                parameter.nvme_swapper.swap_out_and_release([parameter])

    def _info(self, owner: Any) -> Any:
        return self._optimizer.optimizer_swapper.swap_params_info[owner.ds_id]

    def _map(self, path: str, number: int) -> Tensor:
        if path not in self._mapped:
            size = int(self._optimizer.fp16_partitioned_groups_flat_numel[number])
            dtype = self._optimizer.master_weights_and_grads_dtype
            self._mapped[path] = torch.from_file(path, shared=True, size=size, dtype=dtype)
        return self._mapped[path]


def add_buffers(derived: dict[str, Any], setup: EngineSetup) -> None:
    """Set DeepSpeed's buffers for files: at least as many, and as large, as can be in use at once. A JSON of the user's
    own may ask for more; with fewer, DeepSpeed would fail in the midst of a step."""
    zero = derived["zero_optimization"]
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        offload = zero["offload_optimizer"]
        offload["buffer_count"] = max(BUFFERS_OF_A_STEP, offload.get("buffer_count", 0))
    if zero.get("offload_param", {}).get("device") == "nvme":
        offload, sizes = zero["offload_param"], _shard_sizes(setup)
        swapping = importlib.import_module("deepspeed.runtime.swap_tensor.utils")
        smallest = max(swapping.MIN_AIO_BYTES, derived.get("aio", {}).get("block_size", 2**20))
        bytes_each = PRECISIONS[setup.precision].compute_dtype.itemsize
        in_files = {name for name, size in sizes.items() if size * bytes_each >= smallest}
        if any(math.prod(map(setup.mesh.size, setup.layout[name].data_axes.all)) == 1 for name in in_files):
            raise UsageError(f"{NVME_UNSHARDED_ERROR}: {NVME_UNSHARDED_HINT}")
        offload["buffer_count"] = max(buffers_in_use(setup.model, in_files), offload.get("buffer_count", 0))
        offload["buffer_size"] = max(max(sizes.values()), offload.get("buffer_size", 0))


def _shard_sizes(setup: EngineSetup) -> dict[str, int]:
    """Elements of each weight on this rank, padding included."""
    return {
        name: -(-math.prod(placement.region[1]) // math.prod(map(setup.mesh.size, placement.data_axes.all)))
        for name, placement in setup.layout.items()
    }


def buffers_in_use(model: nn.Module, in_files: set[str]) -> int:
    """Count the weights in files that can be in buffers at once: one block's and, while its last gradients are
    still computed, the next one's, and all that are outside of blocks. Where a part is frozen, modules may get inputs
    without a gradient, whose weights DeepSpeed keeps until the backward pass ends: then it may be all of them."""
    parameters = dict(model.named_parameters())
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return max(1, len(in_files))
    swapped = {id(parameters[name]) for name in in_files}
    inside = [swapped & {id(p) for p in block.parameters()} for block in transformer_blocks(model)]
    outside = swapped.difference(*inside)
    return max(1, len(outside) + sum(sorted(map(len, inside))[-2:]))
