"""The imaginary device: "cuda" tensors are fake, with shapes and no memory; host tensors stay real.

The host decides on packing, contexts and masks as in a real run. The device counts live bytes, kernels, copies and the
lines of code where the host waits for it.

Stand-ins for torch.cuda make a CPU build report a GPU, with streams and events that order nothing. They are for a
separate process: nothing restores torch.cuda.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from megatfm.imaginary.ledger import Ledger, find_calling_line, is_called_by_autograd
from megatfm.ops.torch_private import KERNEL_FREE
from megatfm.verify.traffic import NAMESPACES, TrafficTally

CUDA = torch.device("cuda", 0)
STAND_IN_NAMESPACE = "megatfm_imaginary"
"""Namespace of the operators that stand for fused attention; their last argument is the name of the kernel."""
MIN_PAIRS_LENGTH = 512
"""Length of rows from which tensors of all pairs of tokens are reported."""
DATA_DEPENDENT_ERRORS = ("DynamicOutputShapeException", "DataDependentOutputException")
PINNED: Any = WeakIdKeyDictionary()
"""Host tensors in pinned memory."""
FUSED_ON_GPU = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Operators with kernels of their own in torch's GPU builds; a CPU build composes them of others, which hold more."""
_FUSED_KERNELS = torch.library.Library("aten", "IMPL")


class ImaginaryGPU(TorchDispatchMode):
    """Makes new "cuda" tensors fake while entered.

    memory: live bytes; kernels are counted under its phase. traffic: counts collectives, if set. weight_shapes: of the
    model's weights, whose gradients autograd sums. is_fusing: operators are parts of a fused kernel, which
    `_FusedPass` counts.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile under this mode; the graphs run under it."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.memory = Ledger()
        self.traffic: TrafficTally | None = None
        self.weight_shapes: frozenset[tuple[int, ...]] = frozenset()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.all_pairs: Counter[str] = Counter()
        self.largest: tuple[int, str] = (0, "")
        self.is_fusing = False
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "ImaginaryGPU":
        resize = self._resize

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.memory:
                self.memory.resize(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _track_storage(self, tensor: Any) -> None:
        """Count a new tensor's storage until it is freed."""
        if not (isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda" and tensor.fake_mode is self.fake):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.memory:
            return

        def on_free(_: Any, key: int = key) -> None:
            self.memory.remove(key)

        self.memory.add(key, storage.nbytes(), weakref.ref(storage, on_free))
        if tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2] >= MIN_PAIRS_LENGTH:
            self.all_pairs[f"{list(tensor.shape)} at {find_calling_line()}"] += 1
        if storage.nbytes() > self.largest[0]:
            self.largest = storage.nbytes(), f"{list(tensor.shape)} {tensor.dtype} at {find_calling_line()}"

    def count_wait(self, cause: str) -> None:
        """Count a wait of the host for the device, by cause and line of code."""
        self.waits[f"{cause} at {find_calling_line()}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls of a step ask for it
        options = dict(kwargs or {})
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor dispatches again with its local tensor
        namespace, _, name = func._schema.name.partition("::")
        if self.traffic and namespace in NAMESPACES:
            self.traffic.add_call(func, args, options)
        pinned = options.pop("pin_memory", None)
        if FakeTensor not in types and not _is_for_device(options.get("device")):
            out = func(*args, **options)
            if pinned and isinstance(out, Tensor):
                PINNED[out] = True
            return out
        if name in ("_local_scalar_dense", "equal"):
            self.count_wait(name)
            return True if name == "equal" else (1.0 if args[0].is_floating_point() else 1)
        if name == "copy_" and not isinstance(args[0], FakeTensor):  # to the host
            suffix = " without waiting" if len(args) > 2 and args[2] else ""
            self.copies[f"to the host{suffix} at {find_calling_line()}"] += 1
            return args[0].fill_(1)
        is_copy = name in ("copy_", "_to_copy")
        non_blocking = is_copy and bool(options.get("non_blocking") or (len(args) > 2 and args[2]))
        if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in tree_leaves((args, options))):
            args, options = tree_map_only(
                Tensor, lambda x: self._make_fake_input(x, name, non_blocking), (args, options)
            )
        if name == "add" and self._is_summing_gradients(args[0]):
            func, name = torch.ops.aten.add_.Tensor, "add_"
        out = self._run(func, name, args, options)
        if name == "_to_copy" and out.device.type == "cpu":
            self.count_wait("copy to the host")
            return torch.ones(out.shape, dtype=out.dtype)
        if not self.is_fusing:
            self.track(out)
        return out

    def track(self, values: Any) -> None:
        """Count the storages of new tensors until they are freed."""
        for x in tree_leaves(values):
            self._track_storage(x)

    def _make_fake_input(self, x: Tensor, name: str, non_blocking: bool) -> Tensor:
        """Return a fake of a host tensor for an operator on the device; the host waits for it unless it is pinned."""
        if isinstance(x, FakeTensor) or x.device.type == "meta":
            return x
        if (x.dim() or name == "_to_copy") and name != "lift_fresh":
            if x in PINNED and non_blocking:
                self.copies[f"to the device at {find_calling_line()}"] += 1
            else:
                self.count_wait(f"copy to the device ({name})")
        with self.fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def _is_summing_gradients(self, gradient: Tensor) -> bool:
        """Return whether autograd adds gradients: to earlier ones, or of several uses of a weight. It does so in place,
        but not under a dispatch mode."""
        node: Any = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():
            return False
        is_of_weight = tuple(gradient.shape) in self.weight_shapes and is_called_by_autograd()
        return is_of_weight or str(node.name()).endswith("AccumulateGrad")

    def _run(self, func: Any, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            with self.fake:
                out = func(*args, **options)
        except Exception as error:
            if type(error).__name__ in DATA_DEPENDENT_ERRORS:
                self.count_wait(f"{name}, whose shape depends on values,")
            raise
        if func.namespace == STAND_IN_NAMESPACE:
            name = f"attention by {args[-1]}"
        if (
            not self.is_fusing
            and name not in KERNEL_FREE
            and func.namespace not in ("prim", "c10d", "_c10d_functional")
        ):
            self.kernels[self.memory.phase, name] += 1
        return out


def _is_for_device(device: Any) -> bool:
    """Return whether an operator is asked to make its output on the imaginary device."""
    return device is not None and torch.device(device).type == "cuda"


# ------------------------------------------------------------------------------------------------ torch.cuda


class _Stub:
    """Stream, event, or a context of either; does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.device_index, self.stream_id, self.device_type = CUDA, 0, 0, 1

    def __enter__(self) -> "_Stub":
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> "_Stub":
        return self

    def record_event(self, *args: Any) -> "_Stub":
        return _Stub()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: True if name == "query" else None


def install_torch_stubs(name: str, capability: tuple[int, int]) -> None:
    """Make torch.cuda report a device of this name. Dynamo reads torch.cuda once, so it is imported before.

    Sends to ranks that do not exist are complete at once, so that nothing keeps what was sent.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()
    cuda: Any = torch.cuda
    for key in ("Stream", "Event", "stream", "device"):
        setattr(cuda, key, _Stub)
    results = {
        "current_stream": _Stub(), "default_stream": _Stub(), "set_device": None, "synchronize": None,
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 8, "current_device": 0,
        "is_current_stream_capturing": False,
        "get_device_capability": capability, "get_device_name": name,
        "get_device_properties": SimpleNamespace(name=name, major=capability[0], minor=capability[1]),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    for key, result in results.items():
        setattr(cuda, key, _make_constant(result))
    for operator in FUSED_ON_GPU:
        _FUSED_KERNELS.impl(operator, _refuse, "CUDA")
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory = _pin
    torch._C._set_only_lift_cpu_tensors(True)  # Python lists become host tensors first
    work: Any = torch.distributed.Work
    work.is_completed = lambda self: True


def _make_constant(result: Any) -> Any:
    """Return a new function that returns `result`. Dynamo has a rule for each function of torch.cuda."""
    return lambda *args, **kwargs: result


def _refuse(*args: Any, **kwargs: Any) -> Any:
    """Kernel that never runs: the imaginary device takes each operator before."""
    raise AssertionError("an imaginary GPU computes nothing")


def _pin(tensor: Tensor, *args: Any) -> Tensor:
    copy = tensor.clone()
    PINNED[copy] = True
    return copy
