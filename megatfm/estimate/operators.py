"""Records the operators of a pass where torch dispatches them: shapes, FLOPs, bytes, and the storages read and written.

Tensors are fake, so a pass of a block of any size takes a fraction of a second. A storage is known by its number
(`OperatorRecorder.number`), as torch reuses the addresses of freed ones.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatfm.ops.torch_private import KERNEL_FREE

Kind = Literal["matmul", "attention", "pointwise", "collective"]

MATMULS = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
}
COPIES = {"copy_", "clone", "_to_copy"}
"""Operators that rearrange elements."""
REDUCTIONS = {"sum", "mean", "amax"}
"""Operators whose time depends on the dimensions that they reduce."""
COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass(frozen=True)
class Operator:
    """One kernel."""

    name: str
    """Name of torch's operator; "attention" for the fused kernel."""
    kind: Kind
    flops: float
    reads: Mapping[int, int]
    """Storage → bytes that it reads."""
    writes: Mapping[int, int]
    """Storage → bytes that it writes."""
    dims: tuple[int, int, int, int] | None = None
    """Sizes of a matmul: (batch, m, n, k)."""
    itemsize: int = 2
    """Bytes of an element."""
    is_backward: bool = False
    collective: str = ""
    """Name of the collective, such as "all_gather"."""
    sent_bytes: int = 0
    """Bytes that this rank sends in a ring collective."""
    fetched_tokens: int = 0
    """Most tokens whose keys a rank sends for local attention under context parallelism; 0: keys go around."""
    is_eager: bool = False
    """Whether its module stays eager in compiled blocks."""
    variant: str = ""
    """Name with what the time depends on beside bytes (`describe_variant`); of a matmul: its operands' layouts."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Recording:
    """Operators of a pass and the memory that it took."""

    operators: list[Operator] = field(default_factory=list)
    """Its kernels, in order."""
    live: list[int] = field(default_factory=list)
    """Bytes that are live after each call of an operator, kernel or view, less those that were live before the pass."""
    created: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Storage → index in `live` of the call that allocated it, and its bytes."""
    last_calls: dict[int, int] = field(default_factory=dict)
    """Storage → index in `live` of the last call that reads or writes it, or makes a view of it, but by `detach`."""

    def peak(self) -> int:
        """Return the most bytes that are live at once."""
        return max(self.live, default=0)

    def live_without(self, numbers: Iterable[int]) -> list[int]:
        """Return the live bytes after each call, without some storages that outlive the pass."""
        return self.live_until({number: -1 for number in numbers if number in self.created})

    def live_until(self, freed: Mapping[int, int]) -> list[int]:
        """Return the live bytes after each call, as if some storages that outlive the pass were freed earlier.

        freed: storage → index of the last call after which it is live; a saved storage may be among them.
        """
        live = list(self.live)
        for number, last in freed.items():
            first, n_bytes = self.created[number]
            for index in range(max(first, last + 1), len(live)):
                live[index] -= n_bytes
        return live


class OperatorRecorder(TorchDispatchMode):
    """Records the operators of this thread, and how many bytes of their outputs are live."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._count = 0
        self._live = self._base = 0

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record a pass: yield its recording, whose bytes are counted from 0."""
        outer, self.recording = self.recording, Recording()
        self._base = self._live
        try:
            with self:
                yield self.recording
        finally:
            self.recording = outer

    def live_storages(self, recording: Recording) -> dict[int, int]:
        """Return number → bytes of the storages that a pass allocated and that are still live."""
        live = {number: self._sizes.get(key, 0) for key, number in self._numbers.items()}
        return {number: live[number] for number in recording.created if number in live}

    def number(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage, which is never used again."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._count += 1
            self._numbers[key] = self._count

            def on_free(_: Any, key: int = key) -> None:
                self._numbers.pop(key, None)
                self._references.pop(key, None)
                self._live -= self._sizes.pop(key, 0)

            self._references[key] = weakref.ref(storage, on_free)
        return self._numbers[key]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls of a pass ask for it
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "prim":
            return out
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        input_numbers = {self.number(x) for x in inputs}
        for x in outputs:
            number, key = self.number(x), x.untyped_storage()._cdata
            if number not in input_numbers and key not in self._sizes:
                self._sizes[key] = x.untyped_storage().nbytes()
                self._live += self._sizes[key]
                self.recording.created[number] = len(self.recording.live), self._sizes[key]
        if name != "detach":
            self.recording.last_calls |= dict.fromkeys(map(self.number, (*inputs, *outputs)), len(self.recording.live))
        self.recording.live.append(self._live - self._base)
        if name in KERNEL_FREE:
            return out
        self.recording.operators.append(self._make_operator(func, name, inputs, outputs, args, kwargs or {}))
        return out

    def _make_operator(
        self,
        func: Any,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Operator:
        reads = {self.number(x): count_tensor_bytes(x) for x in inputs}
        writes = {self.number(x): count_tensor_bytes(x) for x in outputs}
        if name.endswith("_") and inputs:  # in place
            writes = {self.number(inputs[0]): count_tensor_bytes(inputs[0])}
        itemsize = (outputs or inputs)[0].element_size() if outputs or inputs else 4
        if func.namespace in COLLECTIVES:
            collective, sent = _describe_collective(func, name, args, kwargs)
            return Operator(
                name, "collective", 0, reads, writes, itemsize=itemsize, collective=collective, sent_bytes=sent
            )
        if name in MATMULS:
            dims = _get_matmul_dims(name, [x for x in args if isinstance(x, Tensor)], outputs)
            flops = 2 * math.prod(dims)
            variant = describe_layouts(inputs)
            return Operator(name, "matmul", flops, reads, writes, dims, inputs[0].element_size(), variant=variant)
        variant = describe_variant(name, inputs, args, kwargs)
        return Operator(name, "pointwise", 0, reads, writes, itemsize=itemsize, variant=variant)


def describe_layouts(inputs: Sequence[Tensor]) -> str:
    """Return the layouts of a matmul's operands, as BLAS names them: n for rows in memory order, t for columns.

    Of a batch, "strided" says that other matrices lie between the rows of one, as heads do between those of a head.
    """
    operands = [x for x in inputs if x.dim() >= 2][-2:]
    letters = "".join("n" if x.stride(-1) == 1 or x.shape[-1] == 1 else "t" for x in operands)
    rows = [x if letter == "n" else x.mT for x, letter in zip(operands, letters, strict=True) if x.dim() == 3]
    return f"{letters} strided" if any(x.stride(-2) > x.shape[-1] for x in rows) else letters


def describe_variant(name: str, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of an operator with what its time depends on beside bytes: words among its arguments, types other
    than float32, and inputs that are not contiguous where it copies."""
    words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    arrays = [x for x in inputs if x.dim()] or list(inputs)
    dtypes = list(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in arrays))
    if dtypes != ["float32"]:
        words += dtypes
    if name in REDUCTIONS:
        words += [str(value) for value in args if isinstance(value, list)]
    if name in COPIES and any(not x.is_contiguous() for x in inputs):
        words.append("strided")
    return f"{name}({', '.join(words)})" if words else name


def count_tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; expanded elements share theirs."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _get_matmul_dims(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """Return a matmul's batch, m, n and k."""
    if name.startswith("convolution"):
        weight, at_outputs = (inputs[1], outputs[0]) if name == "convolution" else (inputs[2], inputs[0])
        positions = at_outputs.numel() // at_outputs.shape[1]
        products = sum(x.dim() == weight.dim() for x in outputs)  # backward: the input's gradient, the weight's
        return products, positions, weight.shape[0], math.prod(weight.shape[1:])
    left, right = [x for x in inputs if x.dim() >= 2][-2:]
    if left.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    return 1, left.shape[0], right.shape[-1], left.shape[1]


def _describe_collective(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, int]:
    """Return the collective's name, and the bytes that this rank sends in a ring."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    named |= kwargs
    group = (
        ProcessGroup.unbox(named["process_group"])
        if "process_group" in named
        else _resolve_process_group(named["group_name"])
    )
    size = group.size()
    payload = next(value for key, value in named.items() if key.startswith(("input", "tensor")))
    n_bytes = sum(count_tensor_bytes(x) for x in tree_leaves(payload) if isinstance(x, Tensor))
    factors = {
        "all_gather": size - 1,
        "reduce_scatter": (size - 1) / size,
        "all_reduce": 2 * (size - 1) / size,
        "all_to_all": (size - 1) / size,
    }
    for collective, factor in factors.items():
        if name.replace("_", "").startswith(collective.replace("_", "")):
            return collective, int(n_bytes * factor)
    return name, n_bytes
