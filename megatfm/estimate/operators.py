"""Operators of a pass, recorded where torch dispatches them: shapes, FLOPs, bytes and what each reads and writes.

Tensors have shapes and no numbers, so a pass of a block of any size takes a fraction of a second.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["matmul", "attention", "pointwise", "collective"]

MATMULS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
}
FREE = {
    "view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "slice", "select", "split",
    "split_with_sizes", "chunk", "as_strided", "unsqueeze", "squeeze", "permute", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "unbind", "_reshape_alias", "lift_fresh", "device",
    "promote_types", "wait_tensor", "movedim", "unfold", "diagonal", "detach_", "is_same_size",
}  # fmt: skip
"""Operators that launch no kernel: views, and memory that is not yet set."""
COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass(frozen=True)
class Operator:
    """One kernel. reads, writes: storage → bytes. dims: (products, m, n, k) of matrix products. itemsize: of what is
    computed. sent_bytes: what a ring makes this rank send, of a collective."""

    name: str
    kind: Kind
    flops: float
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    dims: tuple[int, int, int, int] | None = None
    itemsize: int = 2
    is_backward: bool = False
    collective: str = ""
    sent_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Recording:
    """Operators of a pass and the memory that it took.

    live: bytes of what the pass made and was live after each operator. born: storage → the operator after which it is
    there, and its bytes. left: bytes that were live at the end.
    """

    operators: list[Operator] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    born: dict[int, tuple[int, int]] = field(default_factory=dict)
    left: int = 0

    def peak(self, without: Iterable[int] = ()) -> int:
        """Most bytes that were live at once, leaving out some storages that stay."""
        return max(self.live_without(without), default=0)

    def live_without(self, numbers: Iterable[int]) -> list[int]:
        """Live bytes after each operator, leaving out some storages that stay."""
        live = list(self.live)
        for number in numbers:
            first, n_bytes = self.born.get(number, (len(live), 0))
            for place in range(first, len(live)):
                live[place] -= n_bytes
        return live


class OperatorRecorder(TorchDispatchMode):
    """Records the operators of this thread, and how many bytes of what they made are live."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._count = 0
        self._live = self._base = 0

    @contextmanager
    def fresh(self) -> Iterator[Recording]:
        """Record what runs in here by itself; bytes are counted from 0."""
        before, self.recording = self.recording, Recording()
        self._base = self._live
        try:
            with self:
                yield self.recording
        finally:
            self.recording.left = self._live - self._base
            self.recording = before

    def live_storages(self, recording: Recording) -> dict[int, int]:
        """Return number → bytes of the storages that a pass made and that are still there."""
        live = {number: self._sizes.get(key, 0) for key, number in self._numbers.items()}
        return {number: live[number] for number in recording.born if number in live}

    def number(self, tensor: Tensor) -> int:
        """Return a number of the tensor's storage that no later storage gets."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._count += 1
            self._numbers[key] = self._count

            def gone(_: Any, key: int = key) -> None:
                self._numbers.pop(key, None)
                self._watched.pop(key, None)
                self._live -= self._sizes.pop(key, 0)

            self._watched[key] = weakref.ref(storage, gone)
        return self._numbers[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "prim":
            return out
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {self.number(x) for x in inputs}
        for x in outputs:
            number, key = self.number(x), x.untyped_storage()._cdata
            if number not in known and key not in self._sizes:
                self._sizes[key] = x.untyped_storage().nbytes()
                self._live += self._sizes[key]
                self.recording.born[number] = len(self.recording.live), self._sizes[key]
        self.recording.live.append(self._live - self._base)
        if name in FREE:
            return out
        self.recording.operators.append(self._operator(func, name, inputs, outputs, args, kwargs or {}))
        return out

    def _operator(
        self,
        func: Any,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Operator:
        reads = {self.number(x): tensor_bytes(x) for x in inputs}
        writes = {self.number(x): tensor_bytes(x) for x in outputs}
        if name.endswith("_") and inputs:  # in place
            writes = {self.number(inputs[0]): tensor_bytes(inputs[0])}
        itemsize = (outputs or inputs)[0].element_size() if outputs or inputs else 4
        if func.namespace in COLLECTIVES:
            collective, sent = _collective(func, name, args, kwargs)
            return Operator(
                name,
                "collective",
                0,
                reads,
                writes,
                itemsize=itemsize,
                collective=collective,
                sent_bytes=sent,
            )
        if name in MATMULS:
            dims = _dims(name, [x for x in args if isinstance(x, Tensor)], outputs)
            flops = 2 * math.prod(dims)
            return Operator(name, "matmul", flops, reads, writes, dims, inputs[0].element_size())
        return Operator(name, "pointwise", 0, reads, writes, itemsize=itemsize)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, each of the storage's once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _dims(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """Return products, m, n and k."""
    if name.startswith("convolution"):
        weight = next(x for x in inputs if x.dim() == 4) if name == "convolution" else inputs[2]
        positions = outputs[0].numel() // max(1, outputs[0].shape[1]) if name == "convolution" else 1
        return 1, positions, weight.shape[0], math.prod(weight.shape[1:])
    left, right = [x for x in inputs if x.dim() >= 2][-2:]
    if left.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    return 1, left.shape[0], right.shape[-1], left.shape[1]


def _collective(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, int]:
    """Return the collective's plain name and the bytes that a ring makes this rank send."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    named |= kwargs
    group = (
        ProcessGroup.unbox(named["process_group"])
        if "process_group" in named
        else _resolve_process_group(named["group_name"])
    )
    size = group.size()
    payload = next(value for key, value in named.items() if key.startswith(("input", "tensor")))
    n_bytes = sum(tensor_bytes(x) for x in tree_leaves(payload) if isinstance(x, Tensor))
    plain = name.strip("_").replace("_", "")
    for word, factor in (
        ("allgather", size - 1),
        ("reducescatter", (size - 1) / size),
        ("allreduce", 2 * (size - 1) / size),
        ("alltoall", (size - 1) / size),
    ):
        if plain.startswith(word):
            spelled = {"allgather": "all_gather", "reducescatter": "reduce_scatter"}
            spelled |= {"allreduce": "all_reduce", "alltoall": "all_to_all"}
            return spelled[word], int(n_bytes * factor)
    return name, n_bytes
