"""What is relied on of names that torch's documentation does not promise."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatfm.ops import torch_private


def test_flash_attention_of_a_cpu_and_its_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 5, 8, generator=random, dtype=torch.float64) for _ in range(4))
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -torch.inf
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3 + mask
    expected = scores.softmax(-1) @ leaves[2]
    for is_causal, attn_mask in ((False, mask), (True, None)):
        out, lse = torch_private.flash_on_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=0.3)
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
        gradients = torch_private.flash_on_cpu_backward(
            g, q, k, v, out, lse, 0.0, is_causal, attn_mask=attn_mask, scale=0.3
        )
        for a, b in zip(gradients, torch.autograd.grad(expected, leaves, g, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)


def test_norms_of_each_in_another_type() -> None:
    norms = torch_private.foreach_norm(
        [torch.tensor([3.0, 4.0]).bfloat16(), torch.empty(0).bfloat16()], 2, torch.float32
    )
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    assert [float(norm) for norm in norms] == [5.0, 0.0]


def test_products_of_8_bits() -> None:
    left, right = (torch.eye(16).to(torch.float8_e4m3fn) for _ in range(2))
    two, four = torch.full((16, 1), 2.0), torch.full((1, 16), 4.0)
    product = torch_private.scaled_mm(
        left, right.t(), scale_a=two, scale_b=four, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    assert torch.equal(product.float(), 8 * torch.eye(16))


def test_a_weak_dictionary_knows_a_tensor_as_long_as_it_is_there() -> None:
    known, tensor = torch_private.weak_dictionary(), torch.zeros(2)
    known[tensor] = "here"
    assert known.get(torch.zeros(2)) is None
    assert known.get(tensor) == "here"
    del tensor
    gc.collect()
    assert len(known) == 0


def test_fake_tensors_are_known() -> None:
    with FakeTensorMode():
        assert torch_private.is_fake(torch.zeros(2))
    assert not torch_private.is_fake(torch.zeros(2))


def test_a_pass_knows_whether_the_graph_is_kept() -> None:
    x, kept = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: kept.append(torch_private.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert kept == [True, False]


def test_matrix_units_are_asked_for() -> None:
    assert torch_private.has_amx_tiles() in (True, False)
