"""Products of experts: grouped as in a loop, sorted rows, sums in one order, and what a capacity leaves out."""

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.engines.activation_checkpointing import recompute
from megatfm.layers.moe import experts
from megatfm.layers.moe import experts as dispatch
from megatfm.layers.moe.experts import expert_capacity, find_within_capacity, sort_by_expert
from megatfm.ops import moe, transfer
from megatfm.ops.moe import choose_grouped_kernel, grouped_linear, looped_linear
from tests.support.models import B, D, E, T, build_moe, moe_inputs, moe_sequence
from tests.support.tensors import OperatorRecorder


@pytest.mark.parametrize("padding", [(slice(1, 2), slice(3, None)), (slice(None), slice(None))], ids=["some", "all"])
def test_rows_beyond_the_last_expert_reach_nothing(
    padding: tuple[slice, slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows, and the gradients of its rows, may be anything, also if no expert has any token."""
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[padding] = -1

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
    for first, second in zip(*result, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)  # sums go by expert, and by choice


def find_unordered_adds(operator: Any, inputs: list[Tensor], _: object) -> list[str]:
    """Operators that add numbers to one place in an order that GPUs choose anew each time."""
    name = operator._schema.name.partition("::")[2].rstrip("_")
    if name != "index_add" or not inputs[0].is_floating_point():
        return []
    return [name] * (len(inputs[1].unique()) < inputs[1].numel())


def test_on_a_gpu_sums_over_experts_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = build_moe(top_k=3), moe_inputs()
    with OperatorRecorder(find_unordered_adds) as on_the_host:
        torch.autograd.grad(module(x, moe_sequence()).y.sum(), x)
    monkeypatch.setattr(dispatch, "is_host_readable", lambda tensor: False)
    with OperatorRecorder(find_unordered_adds) as on_a_gpu:
        torch.autograd.grad(module(x, moe_sequence()).y.sum(), x)
    assert on_the_host.records
    assert not on_a_gpu.records


@pytest.mark.parametrize("padded", [False, True])
def test_on_a_gpu_each_row_of_an_expert_is_read_and_written_once(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch writes rows, combine reads them; backward combine writes gradients and reads rows, dispatch reads."""
    monkeypatch.setattr(dispatch, "is_host_readable", lambda tensor: False)
    generator, tokens, top_k, n_experts = torch.Generator().manual_seed(0), 40, 3, 5
    choices = torch.rand(tokens, n_experts + 2, generator=generator).argsort(-1)[:, :top_k].flatten()
    if padded:
        choices = choices % n_experts
    order, ends = sort_by_expert(choices, n_experts)
    rows = dispatch.SortedRows(order, ends, top_k, padded=padded)
    x = torch.randn(tokens, D, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(len(choices), dtype=torch.float64, generator=generator).requires_grad_()
    direction = torch.randn(tokens, D, dtype=torch.float64, generator=generator)

    def find_passes(operator: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[str]:
        """Operators, once for each matrix of all rows they read or write, but for views and new memory."""
        name = operator._schema.name
        if operator.is_view or "empty" in name or name == "aten::detach":
            return []
        return [name for x in inputs + outputs if x.dim() > 1 and x.numel() == len(choices) * D]

    with OperatorRecorder(find_passes) as passes:
        y = rows.combine(rows.dispatch(x), weights)
        actual = y, *torch.autograd.grad(y, [x, weights], direction)
    assert len(passes.records) == 2 + 3
    sums = (weights * (choices < n_experts)).view(tokens, top_k, 1).expand(-1, -1, D).sum(1) * x
    for result, expected in zip(actual, (sums, *torch.autograd.grad(sums, [x, weights], direction)), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_rows_are_put_in_order_by_reads_alone_in_both_passes() -> None:
    """The adjoint of an indexed read adds rows to zeros, which GPUs sort for."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, generator=generator).requires_grad_()
    order = torch.randperm(9, generator=generator)
    with OperatorRecorder(lambda operator, *_: [operator._schema.name.partition("::")[2]]) as names:
        ordered = moe.permute_rows(rows, order, order.argsort())
        (gradient,) = torch.autograd.grad(ordered, rows, ordered.detach().sin())
    assert torch.equal(ordered, rows[order])
    assert torch.equal(gradient, rows.detach().sin())
    assert set(names.records) - {"detach", "argsort", "sort", "sin"} == {"index_select"}


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Stand-in for grouped_gemm.backend.gmm, with readable errors."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.device.type == "cpu"
    assert int(batch_sizes.sum()) == len(a) > 0
    groups = a.split(batch_sizes.tolist())
    if trans_a:
        b_groups = b.split(batch_sizes.tolist())
        return torch.stack([rows.T @ b_rows for rows, b_rows in zip(groups, b_groups, strict=True)])
    return torch.cat([rows @ (weight.T if trans_b else weight) for rows, weight in zip(groups, b, strict=True)])


def install_stand_in(monkeypatch: pytest.MonkeyPatch, function: Any = gmm) -> None:
    monkeypatch.setitem(sys.modules, "grouped_gemm", types.ModuleType("grouped_gemm"))
    monkeypatch.setitem(sys.modules, "grouped_gemm.backend", types.SimpleNamespace(gmm=function))


class TwoProducts(nn.Module):
    """A block of two grouped products with an activation between them."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.kernel = kernel
        self.up = nn.Parameter(torch.randn(4, 24, D, generator=generator).bfloat16())
        self.down = nn.Parameter(torch.randn(4, D, 24, generator=generator).bfloat16())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.kernel(self.kernel(x, self.up, ends).relu(), self.down, ends).sin()


def test_selective_recomputation_repeats_no_product_of_megablocks(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    install_stand_in(monkeypatch, lambda *inputs: (products.append(1), gmm(*inputs))[1])
    ends, counts, gradients = torch.tensor([3, 3, 9, 11], dtype=torch.int32), {}, {}
    for how in ("none", "selective", "full"):
        block = TwoProducts(moe.megablocks_linear)
        recompute(block, [block], how)
        x = torch.arange(11.0 * D).view(11, D).sin().bfloat16().requires_grad_()
        products.clear()
        gradients[how] = torch.autograd.grad(block(x, ends).sum(), [x, *block.parameters()])
        counts[how] = len(products)
    assert counts == {"none": 6, "selective": 6, "full": 8}
    for how in ("selective", "full"):
        for gradient, expected in zip(gradients[how], gradients["none"], strict=True):
            assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("dtype_", "kernel"), [
    (torch.float32, "grouped"), (torch.bfloat16, "grouped"), (torch.bfloat16, "windows"),
    (torch.bfloat16, "megablocks"),
])  # fmt: skip
def test_the_grouped_product_is_the_loop(dtype_: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, D, generator=generator).to(dtype_).requires_grad_()
    weight = torch.randn(4, 24, D, generator=generator).to(dtype_).requires_grad_()
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    assert choose_grouped_kernel(x, weight) == ("windows" if dtype_ == torch.bfloat16 else "grouped")
    monkeypatch.setattr(moe, "choose_grouped_kernel", lambda *_: kernel)
    direction = torch.randn(11, 24, generator=generator).to(dtype_)
    result = []
    for product in (grouped_linear, looped_linear):
        y = product(x, weight, ends)[:11]
        result.append((y, *torch.autograd.grad((y * direction).sum(), [x, weight])))
    for first, second in zip(*result, strict=True):
        rows = slice(0, 11) if len(first) == 13 else slice(None)
        torch.testing.assert_close(first[rows], second[rows])
    monkeypatch.undo()
    for pair in ((x.double(), weight.double()), (x.float(), weight[:, :7])):
        assert choose_grouped_kernel(*pair) == "loop"
    nothing = moe.KERNELS[kernel](x, weight, torch.zeros_like(ends))
    assert torch.autograd.grad(nothing[:0].sum(), [weight], allow_unused=True)[0] is not None


def test_the_host_waits_for_the_rows_of_groups_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """MegaBlocks' operator wants them on the host; an expert's two or three products take the same groups."""
    install_stand_in(monkeypatch)
    monkeypatch.setattr(transfer, "is_on_host", lambda _: False)
    real, waits = Tensor.cpu, []
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: waits.append(1) or real(tensor).clone())
    x, weight = torch.randn(11, D).bfloat16(), torch.randn(4, D, D).bfloat16()
    ends = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    for _ in range(3):
        moe.megablocks_linear(x, weight, ends)
    assert len(waits) == 1
    ends[0] = 2
    expected = looped_linear(x, weight, ends)
    torch.testing.assert_close(moe.megablocks_linear(x, weight, ends), expected)
    assert len(waits) == 2, "they were written since"


def test_windows_hold_their_groups_and_have_few_lengths() -> None:
    """Any routing is covered; rows beyond the last group, which may be undefined, are in no window."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(100):
        ends = torch.randint(0, 4097, (8,), generator=generator).sort().values.tolist()
        result = moe.make_windows(ends)
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


def test_first_choices_take_room_before_second_ones() -> None:
    choices = torch.tensor([[[0, 1], [1, 0], [0, 1], [2, 2]]])
    assert find_within_capacity(choices, 2, expert_capacity(choices, 2, 0.5)).tolist() == [
        [[True, True], [True, False], [True, False], [True, True]]
    ]


def count_taken_choices(choices: Tensor, capacity: int, by_position: bool) -> list[list[list[bool]]]:
    """Choices that experts take, counted one by one; without a capacity all."""
    rows, tokens, k = choices.shape
    is_taken = [[[True] * k for _ in range(tokens)] for _ in range(rows)]
    for row in range(rows):
        loads = dict.fromkeys(range(E), 0)
        turns = [(t, i) for t in range(tokens) for i in range(k)]
        for t, i in turns if by_position else sorted(turns, key=lambda turn: turn[::-1]):
            expert = int(choices[row, t, i])
            if expert < E:
                is_taken[row][t][i] = loads[expert] < capacity
                loads[expert] += 1
    return is_taken


@pytest.mark.parametrize("by_position", [False, True])
def test_room_is_taken_in_the_order_of_the_policy(by_position: bool) -> None:
    random = torch.Generator().manual_seed(0)
    for top_k, capacity in ((1, 2), (2, 3), (3, 1), (3, 40)):
        drawn = torch.rand(4, 23, E, generator=random).argsort(-1)[..., :top_k]
        choices = drawn.where(torch.rand(4, 23, 1, generator=random) < 0.9, E)
        actual = find_within_capacity(choices, E, capacity, by_position=by_position)
        assert actual.tolist() == count_taken_choices(choices, capacity, by_position), (top_k, capacity)


@pytest.mark.parametrize("router", ["top_k", "gshard"])
@pytest.mark.parametrize("policy", ["choice", "position"])
def test_by_position_no_token_depends_on_later_ones(policy: str, router: str) -> None:
    module = build_moe(router={"name": router}, top_k=2, capacity_factor=0.6, drop_policy=policy)
    x, other = moe_inputs().detach(), moe_inputs().detach()
    other[:, T // 2 :] = other[:, T // 2 :].flip(-1)
    with torch.no_grad():
        y, changed = module(x, moe_sequence()).y, module(other, moe_sequence()).y
    difference = float((y - changed)[:, : T // 2].abs().max())
    assert difference < 1e-12 if policy == "position" else difference > 1e-2


def test_a_capacity_that_depends_on_later_tokens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for keys in ({}, {"capacity_factor": 1.0, "drop_policy": "position"}, {"capacity_factor": 1.0, "top_k": 1}):
        build_moe(**keys)
    assert not caplog.messages
    for _ in range(2):
        build_moe(capacity_factor=1.0)
    (line,) = caplog.messages
    assert "model.ffn.capacity_factor with top_k = 3 in a causal model" in line
    assert 'set model.ffn.drop_policy = "position"' in line
