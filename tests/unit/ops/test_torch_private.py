"""Undocumented parts of torch that we rely on: private names, and how often dynamo compiles anew."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Full, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import torch_private
from megatfm.ops.attention import flex
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.torch_private import constant_when_compiled


def test_cpu_flash_attention_and_its_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 5, 8, generator=random, dtype=torch.float64) for _ in range(4))
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3 + mask
    expected = scores.softmax(-1) @ leaves[2]
    for is_causal, attn_mask in ((False, mask), (True, None)):
        out, lse = torch_private.flash_on_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=0.3)
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
        inputs = (g, q, k, v, out, lse, 0.0, is_causal)
        gradients = torch_private.flash_on_cpu_backward(*inputs, attn_mask=attn_mask, scale=0.3)
        torch.testing.assert_close([*gradients], [*torch.autograd.grad(expected, leaves, g, retain_graph=True)])


def test_foreach_norm_accumulates_in_another_dtype() -> None:
    tensors = [torch.tensor([3.0, 4.0]).bfloat16(), torch.empty(0).bfloat16()]
    norms = torch_private.foreach_norm(tensors, 2, torch.float32)
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    assert [float(norm) for norm in norms] == [5.0, 0.0]


def test_scaled_mm_of_8_bit_floats() -> None:
    left, right = (torch.eye(16).to(torch.float8_e4m3fn) for _ in range(2))
    scales = {"scale_a": torch.full((16, 1), 2.0), "scale_b": torch.full((1, 16), 4.0)}
    product = torch_private.scaled_mm(left, right.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    assert torch.equal(product.float(), 8 * torch.eye(16))


def test_a_weak_dictionary_drops_freed_tensors() -> None:
    known, tensor = torch_private.weak_dictionary(), torch.zeros(2)
    known[tensor] = "here"
    assert known.get(torch.zeros(2)) is None
    assert known.get(tensor) == "here"
    del tensor
    gc.collect()
    assert len(known) == 0


def test_fake_tensors_are_recognised() -> None:
    with FakeTensorMode():
        assert torch_private.is_fake(torch.zeros(2))
    assert not torch_private.is_fake(torch.zeros(2))


def test_a_backward_pass_detects_a_retained_graph() -> None:
    x, flags = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: flags.append(torch_private.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert flags == [True, False]


def test_amx_is_queried() -> None:
    assert torch_private.has_amx_tiles() in (True, False)


T = 256


@pytest.fixture
def count_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A counter of graphs that Dynamo hands to the compiler, in whose place they run as they are."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    monkeypatch.setattr(flex, "_compile_flex_attention", lambda: compiled)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    return counter


def draw_documents(number: int) -> torch.Tensor:
    """Two rows of a few documents, other ones in each batch."""
    generator = torch.Generator().manual_seed(number)
    ends = torch.randint(1, T, (2, 3 + number), generator=generator).sort(1).values
    return torch.searchsorted(ends, torch.arange(T).expand(2, T).contiguous(), right=True)


@pytest.mark.parametrize("pattern", [Full(causal=True), Window(30), BigBird(64, 1, 0, 2)], ids=repr)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_is_compiled_once(count_graphs: Any, pattern: AttentionPattern, kv_heads: int) -> None:
    counts = []
    for number in range(3):
        q, k, v = (torch.randn(2, heads, T, 16) for heads in (2, kv_heads, kv_heads))
        row = SequenceMetadata(torch.arange(T)[None], draw_documents(number))
        mask = PatternMask(replace(pattern), row, 0, 2)
        result = flex.flex(q, k, v, mask, None, AttentionOptions(), None)
        expected = attention_reference(q, k, v, mask, None, AttentionOptions(), None)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        counts.append(count_graphs.frame_count)
    assert counts == [1] * 3


def test_constant_when_compiled_equals_torch_s_decorator() -> None:
    actual = dict(vars(constant_when_compiled(lambda: 3)))
    assert actual == dict(vars(torch.compiler.assume_constant_result(lambda: 3))) != {}
