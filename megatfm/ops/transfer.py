"""Memory placement of tensors: aligned like torch's own, and copied to and from a device without stalling the host.

Aligned tensors are contiguous and start at a multiple of 64 bytes. BLAS, LAPACK and other kernels may sum in a
different order for other tensors, so that loaded weights would give different bits than computed ones. All code that
brings tensors into a model, an optimizer or a batch therefore aligns them here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.ops.torch_private import is_fake, weak_dictionary

LINE_BYTES = 64
"""Size of a cache line and of the widest registers. torch allocates memory at multiples of it."""


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and starts at a multiple of 64 bytes."""
    if is_fake(tensor):  # torch's own memory begins at such a multiple
        start = tensor.storage_offset() * tensor.element_size()
    else:
        start = tensor.data_ptr()
    return start % LINE_BYTES == 0 and tensor.is_contiguous()


def align(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is aligned, else an aligned copy."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def align_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors aligned. If one view of a buffer needs a copy, all views are copied, to free the buffer."""
    unaligned = {_identify_storage(tensor) for tensor in tensors.values() if not is_aligned(tensor)}
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) if _identify_storage(tensor) in unaligned else tensor
        for name, tensor in tensors.items()
    }


def allocate_aligned(size: int, line: int = LINE_BYTES) -> NDArray[np.uint8]:
    """Allocate uninitialised bytes aligned to `line`. NumPy requests huge pages from the kernel, torch does not."""
    memory = np.empty(size + line, np.uint8)
    start = -memory.ctypes.data % line
    return memory[start : start + size]


def _identify_storage(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()


_HOST_COPIES: Any = weak_dictionary()
"""Host copies of tensors on a device, by tensor, with the tensor's version when it was copied."""


def move_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on the device, copied asynchronously from pinned memory.

    From pageable memory, the host would wait for the copy and for all earlier work of the GPU. `to_host` returns the
    host's values without a copy back. Raises RuntimeError while a CUDA graph is captured.
    """
    if not values.numel():
        return torch.empty(values.shape, dtype=values.dtype, device=device)  # nothing to copy, or to wait for
    if values.device.type != "cpu" or device.type == "cpu":
        return values.to(device)
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a copy from the host can't be captured: a replay would read what its address holds by then")
    pinned = values.pin_memory()
    return remember_host_copy(pinned.to(device, non_blocking=True), pinned)


def remember_host_copy(tensor: Tensor, host_copy: Tensor) -> Tensor:
    """Register a read-only host copy of a device tensor; return the tensor."""
    if not tensor.is_inference():
        _HOST_COPIES[tensor] = host_copy, tensor._version
    return tensor


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is in host memory."""
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """Return the values in host memory: a CPU tensor itself, or the host copy from which `move_to_device` made it.

    Waits for the device if there is no host copy, if the tensor was modified since, and in compiled code.
    """
    if is_on_host(tensor):
        return tensor
    if torch.compiler.is_compiling():
        return tensor.cpu()
    host_copy = _find_host_copy(tensor)
    return tensor.cpu() if host_copy is None else host_copy


def keep_host_copy(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `function` of tensors on a device, with a host copy of the result if the host has copies of all of them.

    The host computes the function too, so `to_host` of the result needs not wait for the device.
    """
    result = function(*tensors)
    if is_on_host(result) or torch.compiler.is_compiling():
        return result
    host_copies = [copy for tensor in tensors if (copy := _find_host_copy(tensor)) is not None]
    return remember_host_copy(result, function(*host_copies)) if len(host_copies) == len(tensors) else result


def _find_host_copy(tensor: Tensor) -> Tensor | None:
    """Return the host copy of a device tensor, None if there is none or if the tensor was modified since."""
    host_copy, version = _HOST_COPIES.get(tensor, (None, 0))
    return None if host_copy is None or tensor._version != version else host_copy


class HostReads:
    """Values that the host read within a pass, for its recomputation: it needn't wait for the device again."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._remaining: Iterator[Tensor] | None = None

    def make_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context of the pass, in which `read_on_host` records, and that of its recomputation, in which it
        returns the recorded values in order. The latter may be entered again, as by a backward pass in two parts."""
        return _HostReadsContext(self, is_recomputation=False), _HostReadsContext(self, is_recomputation=True)

    def start(self, is_recomputation: bool) -> None:
        """Begin to record, or to return what was recorded."""
        self._remaining = iter(self._values) if is_recomputation else None

    def read(self, tensor: Tensor) -> Tensor:
        """See `read_on_host`."""
        if self._remaining is not None:
            return next(self._remaining)
        self._values.append(tensor.cpu())
        return self._values[-1]


_host_reads: ContextVar[HostReads | None] = ContextVar("host_reads", default=None)


class _HostReadsContext(AbstractContextManager[None]):
    def __init__(self, reads: HostReads, *, is_recomputation: bool) -> None:
        self._reads, self._is_recomputation = reads, is_recomputation

    def __enter__(self) -> None:
        self._reads.start(self._is_recomputation)
        self._token = _host_reads.set(self._reads)

    def __exit__(self, *_: object) -> None:
        _host_reads.reset(self._token)


def read_on_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values in host memory; waits for the device once a tensor, and not in a recomputation.

    A pass and its recomputation must make the same calls in the same order, so that nothing that calls it is cached.
    """
    if is_on_host(tensor):
        return tensor
    if (host_copy := _find_host_copy(tensor)) is not None:
        return host_copy
    reads = _host_reads.get()
    host_copy = tensor.cpu() if reads is None else reads.read(tensor)
    remember_host_copy(tensor, host_copy)
    return host_copy


def find_true_indices(condition: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of true elements of a host tensor, one tensor a dimension, on a device.

    Computed on the host, because it needs their number for shapes.
    """
    return tuple(move_to_device(indices, device) for indices in condition.nonzero(as_tuple=True))


class DeferredReads:
    """Device values that the host needs later. The first access copies all deferred values in one transfer.

    A transfer waits for all earlier work of the device, so a step should have one only.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, list[float]]] = []
        self._copied: list[tuple[Tensor, list[float]]] = []
        self._copy_done: torch.cuda.Event | None = None

    def defer(self, values: Tensor) -> Callable[[], list[float]]:
        """Defer the read of float64 values [n]; return a function that returns them, and reads them if necessary."""
        results: list[float] = []
        self._deferred.append((values, results))

        def finish() -> list[float]:
            if not results:
                self.read()
            return results

        return finish

    def start_copy(self) -> None:
        """Start an asynchronous copy of all deferred values; a read then waits for it, and not for later work."""
        values = torch.cat([values for values, _ in self._deferred])
        if values.device.type != "cpu":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()
        sizes = [values.numel() for values, _ in self._deferred]
        self._copied += zip(values.split(sizes), [target for _, target in self._deferred], strict=True)
        self._deferred = []

    def read(self) -> None:
        """Read all deferred values, waiting for a started copy."""
        if self._deferred:
            self.start_copy()
        if self._copy_done:
            self._copy_done.synchronize()
        for values, target in self._copied:
            target.extend(values.tolist())
        self._copied, self._copy_done = [], None
