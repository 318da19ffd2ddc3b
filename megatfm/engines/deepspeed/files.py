"""How DeepSpeed reads and writes what it keeps in files ("nvme"): in the place of its operator `async_io`.

That one needs a compiler and libaio, and never looks at what a read or a write has come to: one that fails, as at an
address in memory that a disk can't be read to directly, leaves what was there before, and training goes on with it.
Here the system's calls are used, so that what is looked at as memory (`mmap`) is the same file to the byte, and an
error is raised where it happens. They wait: with reading ahead turned off, DeepSpeed waits for each at once anyway.
"""

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatfm.errors import MegatfmError


class SyncIOHandle:
    """DeepSpeed's `aio_handle`; what it is tuned by (blocks, queues, threads) is the operator's alone."""

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
        """How many reads and writes there were since the last time."""
        done, self._pending = self._pending, 0
        return done

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        """A buffer of `count` elements, pinned where there are GPUs."""
        buffer = torch.empty(count, dtype=like.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Nobody needs a buffer any more."""
        return self._buffers.pop(buffer.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is (part of) a buffer of this handle, which lives as long as its engine."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _move(self, call: Any, flags: int, buffer: Tensor, path: str, offset: int) -> int:
        rest = buffer.detach().view(torch.uint8).numpy().data
        try:
            file = os.open(path, flags, 0o600)
            try:
                while rest:
                    if not (done := call(file, [rest], offset)):
                        raise OSError(0, f"it ends {len(rest):,} bytes early")
                    rest, offset = rest[done:], offset + done
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
    """Let DeepSpeed take this for its operator, which it would compile."""
    kind = type(package.ops.op_builder.AsyncIOBuilder())
    kind.load = lambda self, verbose=True: SimpleNamespace(aio_handle=SyncIOHandle)
