"""The imaginary device: "cuda" tensors have shapes and no memory, host tensors stay real.

So all that a run decides on the host (packing, contexts, masks) is decided for real. Live bytes, kernels, copies and
the places where the host waits for the device are counted.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
FREE = {
    "view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "slice", "select", "split",
    "split_with_sizes", "chunk", "as_strided", "unsqueeze", "squeeze", "permute", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "view_as", "unbind", "_reshape_alias", "lift_fresh",
}  # fmt: skip
"""Operators that launch no kernel."""
MANY_TOKENS = 512
"""Length of rows from which a tensor of all pairs of tokens is told of."""
BY_VALUES = ("DynamicOutputShapeException", "DataDependentOutputException")
COUNTING_FILES = ("/verify/traffic", "/imaginary/")
PINNED: Any = WeakIdKeyDictionary()
"""Host tensors in memory that a GPU reads by itself."""


class ImaginaryGPU(TorchDispatchMode):
    """While entered, what is made on "cuda" is a fake tensor. phase: the part of a step that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.now = self.peak = 0
        self.phase = "build"
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.all_pairs: Counter[str] = Counter()
        self.largest: tuple[int, str] = (0, "")
        self._live: dict[int, tuple[int, Any]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "ImaginaryGPU":
        this, resize = self, self._resize

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in this._live:
                this._set(storage._cdata, size, this._live[storage._cdata][1])
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _set(self, key: int, size: int, reference: Any) -> None:
        before = self._live[key][0] if key in self._live else 0
        self._live[key] = size, reference
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _see(self, tensor: Any) -> None:
        if not (isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return

        def gone(_: Any, key: int = key) -> None:
            self.now -= self._live.pop(key, (0, None))[0]

        self._set(key, storage.nbytes(), weakref.ref(storage, gone))
        if tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2] >= MANY_TOKENS:
            self.all_pairs[f"{list(tensor.shape)} at {place()}"] += 1
        if storage.nbytes() > self.largest[0]:
            self.largest = storage.nbytes(), f"{list(tensor.shape)} {tensor.dtype} at {place()}"

    def wait(self, what: str) -> None:
        """Count a place where the host waits for the device."""
        self.waits[f"{what} at {place()}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if any(is_traceable_wrapper_subclass(x) for x in tree_leaves((args, options))):
            return NotImplemented  # a DTensor asks again with what it holds
        name = func._schema.name.partition("::")[2]
        pinned = options.pop("pin_memory", None)
        if not self._is_ours(args, options):
            out = func(*args, **options)
            if pinned and isinstance(out, Tensor):
                PINNED[out] = True
            return out
        if name in ("_local_scalar_dense", "equal"):
            self.wait(name)
            return True if name == "equal" else (1.0 if args[0].is_floating_point() else 1)
        if name == "copy_" and not isinstance(args[0], FakeTensor):  # to the host
            self.copies[
                f"to the host{' without waiting' if len(args) > 2 and args[2] else ''} at {place()}"
            ] += 1
            return args[0].fill_(1)
        copies = name in ("copy_", "_to_copy")
        waits_not = copies and bool(options.get("non_blocking") or (len(args) > 2 and args[2]))
        args, options = tree_map_only(Tensor, lambda x: self._by_shape(x, name, waits_not), (args, options))
        if name == "add" and _accumulates():
            func, name = torch.ops.aten.add_.Tensor, "add_"
        out = self._run(func, name, args, options)
        if name == "_to_copy" and out.device.type == "cpu":
            self.wait("copy to the host")
            return torch.ones(out.shape, dtype=out.dtype)
        for x in tree_leaves(out):
            self._see(x)
        return out

    def _is_ours(self, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        device = options.get("device")
        on_cuda = device is not None and torch.device(device).type == "cuda"
        return on_cuda or any(isinstance(x, FakeTensor) for x in tree_leaves((args, options)))

    def _by_shape(self, x: Tensor, name: str, waits_not: bool) -> Tensor:
        """A host tensor's shape, for an operator on the device; the driver reads what is not pinned before it goes
        on."""
        if isinstance(x, FakeTensor) or x.device.type == "meta":
            return x
        if (x.dim() or name == "_to_copy") and name != "lift_fresh":
            if x in PINNED and waits_not:
                self.copies[f"to the device at {place()}"] += 1
            else:
                self.wait(f"copy to the device ({name})")
        with self.fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def _run(self, func: Any, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            with self.fake:
                out = func(*args, **options)
        except Exception as error:
            if type(error).__name__ in BY_VALUES:
                self.wait(f"{name}, whose shape depends on values,")
            raise
        if name not in FREE and func.namespace not in ("prim", "c10d", "_c10d_functional"):
            self.kernels[self.phase, name] += 1
        return out


def _accumulates() -> bool:
    """Whether autograd adds a gradient to earlier ones: in place, but for modes that look on."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and str(node.name()).endswith("AccumulateGrad") and not torch.is_grad_enabled()


def place() -> str:
    """File and line of the product's code that is running."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        path = frame.filename
        if (
            "/megatfm/" in path
            and "site-packages" not in path
            and not any(part in path for part in COUNTING_FILES)
        ):
            return f"{path.rpartition('/megatfm/')[2]}:{frame.lineno}"
    return "torch"
