"""A query that sees no key, also on a ring of ranks, gets 0 from every kernel, and nothing goes back from it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.attention.patterns.pattern import BlockBounds
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.block_sparse import block_sparse_attention, compute_backward, compute_forward
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.fused import sdpa_attention
from megatfm.ops.attention.mask import DenseMask
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.attention.tile import BackwardInputs, BlockAttentionPlan

B, N, T, S, H = 2, 4, 10, 12, 16
BLIND = 3, 7
CASES: dict[str, tuple[Any, str, bool]] = {
    "written out": (attention_reference, "", False),
    "written out, a bias": (attention_reference, "pairs", False),
    "written out, dropout": (attention_reference, "", True),
    "blocks": (block_sparse_attention, "", False),
    "blocks, a bias": (block_sparse_attention, "distances", False),
    "blocks, dropout": (block_sparse_attention, "", True),
    "fused": (sdpa_attention, "", False),
    "fused, a bias": (sdpa_attention, "pairs", False),
    "fused, a bias by distance": (sdpa_attention, "distances", False),
    "flex": (flex, "", False),
    "flex, dropout": (flex, "", True),
}


def compute_attention_by_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Sums over the keys that are seen, of which there may be none."""
    out = torch.zeros(B, N, T, H, dtype=q.dtype)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                weights = [(q[b, n, t] @ k[b, n // 2, s] / H**0.5 + bias[n, t, s]).exp() for s in range(S)]
                keys = [s for s in range(S) if mask[b, t, s]]
                total = sum(float(weights[s]) for s in keys)
                for s in keys:
                    out[b, n, t] += weights[s] / total * v[b, n // 2, s]
    return out


HALF = [pytest.param(name, torch.bfloat16, 2e-2, id=f"{name}, bf16") for name in CASES if "flex" not in name]
FULL = [pytest.param(name, torch.float32, 1e-5, id=name) for name in CASES]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "dtype", "bound"), FULL + HALF)
def test_blind_queries_give_zeros_and_no_gradients(name: str, dtype: torch.dtype, bound: float) -> None:
    run, form, drops = CASES[name]
    random = torch.Generator().manual_seed(0)
    shapes = (B, N, T, H), (B, 2, S, H), (B, 2, S, H)
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    mask = torch.rand(B, T, S, generator=random) < 0.5
    mask[:, :, 0] = True
    mask[0, BLIND] = False
    by_distance = torch.randn(N, T + S - 1, generator=random).to(dtype)
    of_pairs = by_distance.unfold(-1, S, 1).flip(-2)
    bias = {"": None, "pairs": of_pairs[None], "distances": by_distance}[form]
    rng_keys = torch.arange(B * N * T).view(B, N, T) if drops else None
    inputs = [q, k, v] if run is flex else [x.requires_grad_() for x in (q, k, v)]  # flex has no gradients on a CPU
    out = run(
        *inputs, DenseMask(dense=mask[:, None], block_size=4), bias, AttentionOptions(dropout=0.25 if drops else 0.0),
        rng_keys,
    )  # fmt: skip
    assert (out[0, :, BLIND] == 0).all()
    assert out.isfinite().all()
    if not drops:
        added = torch.zeros(N, T, S) if bias is None else of_pairs.float()
        expected = compute_attention_by_loop(*(x.detach().float() for x in (q, k, v)), mask, added)
        torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)
    if run is not flex:
        for gradient in torch.autograd.grad(out[0, :, BLIND].float().sum(), inputs):
            assert (gradient == 0).all()


def test_a_plan_without_blocks_gives_zeros_and_no_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    q, g = (torch.randn(2, 4, 8, 16, generator=random) for _ in range(2))
    k, v = (torch.randn(2, 2, 8, 16, generator=random) for _ in range(2))
    plan = BlockAttentionPlan.build([], 8, 16, AttentionOptions(), zero_distance=7)
    out, lse = compute_forward(q, k, v, None, plan)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    gradients = compute_backward(BackwardInputs(g, q, k, v, out, lse), None, plan)
    assert all((gradient == 0).all() for gradient in gradients)


@dataclass(frozen=True)
class FirstQueriesOnly(AttentionPattern):
    """The first queries see all keys, the others none, as a plugin may have it."""

    count: int

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (q < self.count) & (k >= 0)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (q.first < self.count) & (k.first >= 0)

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (q.last < self.count) & (k.first >= 0)


def test_full_blocks_beside_empty_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "SIZE", 8)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 32, 4, generator=random).requires_grad_() for _ in range(3))
    mask = PatternMask(FirstQueriesOnly(8), SequenceMetadata(torch.arange(32).expand(2, -1)))
    out = block_sparse.block_sparse_attention(q, k, v, mask, None, AttentionOptions(), None)
    assert (out[:, :, 8:] == 0).all()
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :8], k, v)
    torch.testing.assert_close(out[:, :, :8], expected)
    gradients, expected_gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(gradients, expected_gradients)
