"""Drawn and misaligned tensors, comparisons of values and gradients, NaN in unwritten memory, operators counted."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, which follow from shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def move_parameters(module: nn.Module, scale: float) -> Any:
    """Draw every parameter of a module, in float64."""
    generator = torch.Generator().manual_seed(2)
    for parameter in module.double().parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """Compare two results, and every gradient of a drawn sum of their numbers."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    y = draw(*expected.shape, seed=1).to(expected.dtype)
    gradients = [torch.autograd.grad(result, inputs, y, retain_graph=True) for result in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)


@contextmanager
def fill_memory_with_nan() -> Iterator[None]:
    """Have torch.empty give NaN: a kernel that reads what was not written, be it to multiply it by zero, is red."""
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]


OFF = 8
"""Bytes behind a multiple of 64: half a register of SSE, with which BLAS begins where memory does."""


def misalign(tensor: Tensor) -> Tensor:
    """A copy, with the same strides, that begins 8 bytes behind a multiple of 64."""
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(spread * tensor.itemsize + 2 * 64, dtype=torch.uint8)
    # A storage of its own, as that of a file's map or of NumPy is, not a part of one of torch's.
    array = memory.numpy()[-memory.data_ptr() % 64 + OFF :][: spread * tensor.itemsize]
    flat = torch.from_numpy(array).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())


def is_misaligned(tensor: Tensor) -> bool:
    """Whether a tensor begins off a multiple of 64 bytes or has gaps."""
    return tensor.data_ptr() % 64 != 0 or not tensor.is_contiguous()


class MisalignedInputs(TorchDispatchMode):
    """Context that records the operators of torch that take a tensor out of memory that is not torch's own.

    Views are let through: what is cut out of aligned memory at the same place gives the same bits each time.
    """

    PASSING = ("aten.clone", "aten.copy_", "aten._to_copy", "aten.to", "aten.detach", "aten.alias", "c10d.")
    """Operators that move bytes and compute nothing, or make views."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not (func.is_view or str(func).startswith(self.PASSING)):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
                    self.seen += 1
                    if tensor.untyped_storage().data_ptr() % 64:
                        self.wrong.add(f"{func} {list(tensor.shape)}")
        return func(*args, **(kwargs or {}))


@contextmanager
def assert_aligned_inputs() -> Iterator[MisalignedInputs]:
    """Every kernel that runs inside reckons with memory of torch's own."""
    with MisalignedInputs() as kernels:
        yield kernels
    assert kernels.seen
    assert not kernels.wrong, sorted(kernels.wrong)


class OperatorRecorder(TorchDispatchMode):
    """Context that keeps in `records` all that `describe(operator, inputs, outputs)` gives for torch's operators.

    inputs, outputs: the tensors among an operator's arguments and results.
    """

    def __init__(self, describe: Callable[[Any, list[Tensor], list[Tensor]], Iterable[Any]]) -> None:
        super().__init__()
        self.describe, self.records = describe, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), result))
        self.records += self.describe(func, inputs, outputs)
        return result


class OperatorCounter(TorchDispatchMode):
    """Context that counts operators of torch: these, or all that are no views."""

    def __init__(self, operators: Collection[Any] | None = None) -> None:
        super().__init__()
        self.operators = operators
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view if self.operators is None else func in self.operators
        return func(*args, **(kwargs or {}))


BLOCKING_OPERATORS = (
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal",
)  # fmt: skip
"""Operators whose result the host needs before it can go on: a number, or a shape that depends on values."""
BLOCKING_METHODS = ("tolist", "cpu", "numpy")
"""Methods of tensors that bring all values to the host and show up as no operator."""


class HostWaits(TorchDispatchMode):
    """Notes the operators that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        masks = args[1] if str(func).startswith(("aten.index.", "aten.index_put")) else ()
        if name in BLOCKING_OPERATORS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.operators.append(name)
        return func(*args, **(kwargs or {}))
