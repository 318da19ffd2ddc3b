"""Stand-ins for torch.cuda that make a CPU build report a GPU, with streams and events that order nothing.

They are for a separate process: nothing restores torch.cuda.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatfm.imaginary.device import CUDA, PINNED

FUSED_ON_GPU = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Operators with kernels of their own in torch's GPU builds; a CPU build composes them of others, which hold more."""
_FUSED_KERNELS = torch.library.Library("aten", "IMPL")


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


def install(name: str, capability: tuple[int, int]) -> None:
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
