"""Products of experts: the grouped one is the loop, sorted rows, and sums in one order."""

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.layers.moe import experts
from megatfm.layers.moe import experts as dispatch
from megatfm.layers.moe.experts import sort_by_expert
from megatfm.ops import grouped_mm, transfer
from megatfm.ops.grouped_mm import grouped_linear, kernel_for, looped_linear
from tests.support.moe_layers import B, D, T, build_moe, moe_inputs, moe_sequence


def test_what_a_kernel_leaves_beyond_the_last_expert_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows, and the gradients of its rows, may be anything."""
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[1, 3:] = -1

    def poisoned(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
        beyond_M1 = (torch.arange(len(x_MI)) >= ends_G[-1])[:, None]
        assert beyond_M1.any()
        x_MI = x_MI.view_as(x_MI)
        x_MI.register_hook(lambda gradient: gradient.masked_fill(beyond_M1, math.nan))
        return looped_linear(x_MI, weight_GOI, ends_G).masked_fill(beyond_M1, math.nan)

    result = []
    for _ in range(2):
        module, x = build_moe(activation="relu"), moe_inputs()
        y = module(x, moe_sequence(documents)).y
        result.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
        monkeypatch.setattr(dispatch, "is_host_readable", lambda tensor: False)
        monkeypatch.setattr(experts, "grouped_linear", poisoned)
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # sums go by expert, and by choice


class Adds(TorchDispatchMode):
    """Notes what adds numbers to one place in an order that GPUs choose anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name == "index_add" and args[0].is_floating_point():
            self.found += [name] * (len(args[2].unique()) < args[2].numel())
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_sums_over_experts_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build_moe(top_k=3), moe_inputs()
    with Adds() as here:
        torch.autograd.grad(module(x, moe_sequence()).y.sum(), x)
    monkeypatch.setattr(dispatch, "is_host_readable", lambda tensor: False)
    with Adds() as there:
        torch.autograd.grad(module(x, moe_sequence()).y.sum(), x)
    assert here.found
    assert not there.found


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """As grouped_gemm.ops.gmm, which says what it wants less readably."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.device.type == "cpu"
    assert int(batch_sizes.sum()) == len(a) > 0
    parts = a.split(batch_sizes.tolist())
    return torch.cat([part @ (one.T if trans_b else one) for part, one in zip(parts, b, strict=True)])


@pytest.mark.parametrize(
    ("dtype_", "kernel"),
    [
        (torch.float32, "grouped"),
        (torch.bfloat16, "grouped"),
        (torch.bfloat16, "windows"),
        (torch.bfloat16, "megablocks"),
    ],
)
def test_the_grouped_product_is_the_loop(
    dtype_: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grouped_gemm", types.ModuleType("grouped_gemm"))
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", types.SimpleNamespace(gmm=gmm))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, D, generator=generator).to(dtype_).requires_grad_()
    weight = torch.randn(4, 24, D, generator=generator).to(dtype_).requires_grad_()
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    assert kernel_for(x, weight) == ("windows" if dtype_ == torch.bfloat16 else "grouped")
    monkeypatch.setattr(grouped_mm, "kernel_for", lambda *_: kernel)
    direction = torch.randn(11, 24, generator=generator).to(dtype_)
    result = []
    for product in (grouped_linear, looped_linear):
        y = product(x, weight, ends)[:11]
        result.append((y, *torch.autograd.grad((y * direction).sum(), [x, weight])))
    for one, other in zip(*result, strict=True):
        rows = slice(0, 11) if len(one) == 13 else slice(None)
        torch.testing.assert_close(one[rows], other[rows])
    monkeypatch.undo()
    assert kernel_for(x.double(), weight.double()) == kernel_for(x.float(), weight[:, :7]) == "loop"
    nothing = grouped_mm.KERNELS[kernel](x, weight, torch.zeros_like(ends))
    assert torch.autograd.grad(nothing[:0].sum(), [weight], allow_unused=True)[0] is not None


def test_the_host_waits_for_the_rows_of_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """MegaBlocks' operator wants them on the host; an expert's two or three products take the same groups."""
    monkeypatch.setitem(sys.modules, "grouped_gemm", types.ModuleType("grouped_gemm"))
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", types.SimpleNamespace(gmm=gmm))
    monkeypatch.setattr(transfer, "is_on_host", lambda _: False)
    real, waits = Tensor.cpu, []
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: waits.append(1) or real(tensor).clone())
    x, weight = torch.randn(11, D).bfloat16(), torch.randn(4, D, D).bfloat16()
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    for _ in range(3):
        grouped_mm.megablocks_linear(x, weight, ends)
    assert len(waits) == 1
    ends[0] = 2
    expected = looped_linear(x, weight, ends)
    torch.testing.assert_close(grouped_mm.megablocks_linear(x, weight, ends), expected)
    assert len(waits) == 2, "they were written since"


def test_windows_hold_their_groups_and_have_few_lengths() -> None:
    """Whatever the routing; of nothing beyond the last group, where rows may be undefined."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(100):
        ends = torch.randint(0, 4097, (8,), generator=generator).sort().values.tolist()
        result = grouped_mm.padded_ranges(ends)
        assert [last for _, last, _, _ in result] == ends
        assert [first for first, _, _, _ in result] == [0, *ends[:-1]]
        for first, last, low, high in result:
            assert 0 <= low <= first <= last <= high <= ends[-1]
            assert high - low <= max(1.125 * (last - first), last - first + 8)
            lengths |= {high - low} if high - low < ends[-1] else set()
    assert len(lengths) < 70


def test_choices_are_sorted_by_expert_and_others_come_last() -> None:
    order, ends = sort_by_expert(torch.tensor([2, -1, 0, 2, 7, 0]), 3)
    assert order.tolist() == [2, 5, 0, 3, 1, 4]
    assert ends.tolist() == [2, 2, 4]
